"""What a rank runs: `python -m integration_tests.demo.worker '{"task": ...}'`, started by `launch`.

It joins the process group, runs one task, and reports events as JSON lines over an inherited pipe. A rank that has
succeeded ends without the interpreter's own exit, in which gloo's threads abort about one process in sixty.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from integration_tests.demo import training, weights
from integration_tests.demo.launch import EVENTS_FD

__all__ = ["main"]

TASKS: Mapping[str, Callable[..., None]] = {
    "train": training.train,
    "save_weights": weights.save_weights,
    "load_weights": weights.load_weights,
}
FOLDERS = ("checkpoint", "bench")


def main(text: str) -> int:
    """Run the task that `text` describes; returns 0 when it succeeded. An error is reported, and raised."""
    options = json.loads(text)
    options.update({name: Path(options[name]) for name in FOLDERS if name in options})
    task = TASKS[options.pop("task")]
    with os.fdopen(int(os.environ[EVENTS_FD]), "w", encoding="utf-8") as pipe:

        def say(event: str, **values: Any) -> None:
            pipe.write(json.dumps({"event": event, "rank": dist.get_rank(), **values}) + "\n")
            pipe.flush()

        dist.init_process_group("gloo")
        try:
            task(say, **options)
        except Exception as error:
            say("failed", error=f"{type(error).__name__}: {error}")
            raise
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1])  # an error ends the interpreter as usual, with its traceback
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
