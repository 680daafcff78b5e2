"""The process that runs trials, so that one that ends or blocks it is seen: numbers on stdin, outcomes on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

__all__ = ["Worker", "serve"]

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS, _TRIAL_SECONDS = 120.0, 30.0


class Worker:
    """A process that runs trials; started anew when one has ended it.

    Args:
        settings: What `Trials` takes, for `serve`: root, seed, names, scratch.
    """

    def __init__(self, settings: Sequence[Any]) -> None:
        self._settings = json.dumps([str(settings[0]), settings[1], list(settings[2]), str(settings[3])])
        self._process: subprocess.Popen[str] | None = None

    def run(self, number: int) -> dict[str, Any]:
        """The outcome of one trial; `result` is `crash` or `hang` if there is none."""
        process = self._running()
        assert process.stdin is not None
        process.stdin.write(f"{number}\n")
        process.stdin.flush()
        line = self._line(process, _TRIAL_SECONDS)
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        result = "hang" if line is None else "crash"
        self.close()
        return {"number": number, "result": result, "detail": f"exit status {process.returncode}"}

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            code = "import sys; from integration_tests.robustness.campaign.worker import serve; serve(sys.argv[1])"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, self._settings],
                cwd=_ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            if not self._line(self._process, _START_SECONDS):
                raise RuntimeError("the process that runs trials does not start")
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[str], seconds: float) -> str | None:
        """The next line; empty if the process has ended, None if there was none in time."""
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        return process.stdout.readline() if ready else None


def serve(settings: str) -> None:
    """Run the trials whose numbers come in, with little memory."""
    from integration_tests.robustness.campaign.trials import Trials
    from integration_tests.robustness.crafted import little_memory

    warnings.simplefilter("ignore")
    root, seed, names, scratch = json.loads(settings)
    trials = Trials(Path(root), seed, names, Path(scratch))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print("ready", file=answers)
    with contextlib.suppress(BrokenPipeError), little_memory():
        for line in sys.stdin:
            print(json.dumps(asdict(trials.run(int(line)))), file=answers)
