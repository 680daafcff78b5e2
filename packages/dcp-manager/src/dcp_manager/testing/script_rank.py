"""Main program of a rank of `prove_script`: runs a script, and records what it observes at the optimizer's steps."""

from __future__ import annotations

import inspect
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_core import plugins
from dcp_hooks import CheckpointEvent, hookimpl
from dcp_manager.manager import CheckpointManager
from dcp_manager.testing.observing.batches import BatchWatch
from dcp_manager.testing.observing.recorder import Recorder

__all__ = ["run_script"]

_CHEAP_SECONDS = 0.2
_PATIENCE_SECONDS = 30.0


def run_script(text: str) -> None:
    """Run a script as the program of this process, under observation.

    Args:
        text: Job as JSON, made by `prove_script`.
    """
    job = json.loads(text)
    script = job["script"]
    sys.argv = [script, *job["arguments"]]
    sys.path[:] = [str(Path(script).parent), *job["sys_path"]]
    watcher = _Watcher(job)
    watcher.start()
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        watcher.stop()


class _Watcher:
    """Watcher of a script: counts steps and saves, and kills the process after the save that is wanted."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self._folder = Path(job["records"])
        self._wanted_save = job["kill_at_save"]
        self._kills = job["kills"]
        self._resumed = job["first_step"] is not None
        self._steps = job["first_step"] or 0
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._full_at = {self._steps + 1} if self._resumed else set()
        self._restores = self._resumed
        self._saved_ids: list[str] = []
        self._last_seconds = 0.0
        watch = BatchWatch(self._before_forward)
        self._recorder = Recorder(self._folder / f"rank{self._rank}.jsonl", watch)
        self._watch = watch
        self._awaits: str | None = "restored" if self._resumed else None

    def start(self) -> None:
        """Begin to watch."""
        self._watch.start()
        register_optimizer_step_post_hook(self._after_step)
        plugins.register(self, name="dcp-prove")
        begin, watcher = CheckpointManager._save, self  # noqa: SLF001 - it has no hook

        def begin_save(manager: CheckpointManager, step: int, *args: Any, **options: Any) -> Any:
            watcher._begin_save(str(manager.checkpoint_id(step)))
            return begin(manager, step, *args, **options)

        CheckpointManager._save = begin_save  # type: ignore[assignment,method-assign]  # noqa: SLF001

    def stop(self) -> None:
        """Close the record."""
        self._recorder.close()
        plugins.unregister("dcp-prove")

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """See `dcp_hooks.HookSpecs.dcp_on_event`."""
        if event.operation != "save" or event.phase != "total":
            return
        name = str(event.checkpoint_id)
        if event.state == "started":
            self._begin_save(name)
        elif event.state == "finished" and self._kills and self._wanted() == name:
            self._recorder.record("killed", self._steps_at_save, {}, full=False, reads=False)
            self._die()

    def _wanted(self) -> str | None:
        return self._saved_ids[self._wanted_save - 1] if len(self._saved_ids) >= self._wanted_save else None

    def _begin_save(self, name: str) -> None:
        if name in self._saved_ids or self._resumed:
            return
        self._saved_ids.append(name)
        if len(self._saved_ids) == self._wanted_save:
            self._steps_at_save = self._steps
            self._full_at.add(self._steps + 1)
            self._awaits = "saved"

    def _before_forward(self) -> None:
        if self._awaits is not None:
            at, self._awaits = self._awaits, None
            self._recorder.record(at, self._steps, _variables(inspect.currentframe()), full=True, reads=False)

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        variables = _variables(inspect.currentframe())
        full = self._steps in self._full_at or self._last_seconds < _CHEAP_SECONDS
        start = time.monotonic()
        self._recorder.record("step", self._steps, variables, full=full, loss=_loss(variables))
        if full:
            self._last_seconds = time.monotonic() - start

    def _die(self) -> None:
        """Kill this process when all ranks know that the checkpoint exists."""
        (self._folder / f"rank{self._rank}.published").touch()
        end = time.monotonic() + _PATIENCE_SECONDS
        while len([*self._folder.glob("*.published")]) < self._world_size and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def _variables(frame: FrameType | None) -> dict[str, Any]:
    """Return the variables of the script's functions that are running, and of its module."""
    frames = []
    while frame is not None:
        if _is_users(frame):
            frames.append(frame)
        frame = frame.f_back
    found: dict[str, Any] = {}
    for each in [*reversed(frames)]:
        found.update({name: value for name, value in {**_globals(each), **each.f_locals}.items() if name[:2] != "__"})
    return found


def _globals(frame: FrameType) -> dict[str, Any]:
    return frame.f_globals if frame.f_globals.get("__name__") == "__main__" else {}


def _is_users(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if file.startswith("<") or f"{os.sep}site-packages{os.sep}" in file:
        return False
    return not (top in sys.stdlib_module_names or top.startswith("dcp_") or top == "torch")


def _loss(variables: Mapping[str, Any]) -> float | None:
    value = variables.get("loss")
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None
