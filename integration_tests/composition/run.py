"""Runs the scenario for selections of packages, and says which failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from integration_tests.composition.selections import PACKAGES, closure, libraries, place

__all__ = ["outcomes"]

_FORKS = Path(__file__).with_name("forks.py")


def outcomes(asked: Sequence[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """Each selection with the traceback of its failure, or None. Selections that bring the same packages run once."""
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        base = libraries(root / "libraries")
        jobs: dict[tuple[str, ...], dict[str, object]] = {}
        for number, each in enumerate(asked):
            names = closure(each)
            if names not in jobs:
                folder = root / f"work-{number}"
                folder.mkdir()
                path = place(names, root / f"packages-{number}")
                jobs[names] = {
                    "asked": each,
                    "names": names,
                    "known": [*PACKAGES],
                    "path": str(path),
                    "folder": str(folder),
                }
        ran = subprocess.run(
            # -S: no path files, which would show what is installed. Forking warns from Python 3.12 on.
            [sys.executable, "-S", "-W", "error", "-W", "ignore:This process:DeprecationWarning", str(_FORKS)],
            input="".join(json.dumps(job) + "\n" for job in jobs.values()),
            env={**os.environ, "PYTHONPATH": str(base), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        told = {tuple(one["asked"]): one["error"] for one in map(json.loads, ran.stdout.splitlines())}
    for each in asked:
        first = jobs[closure(each)]["asked"]
        yield each, told.get(first, f"not run: the process ended with {ran.returncode}")  # type: ignore[call-overload]
