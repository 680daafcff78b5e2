"""Main program of a rank of `prove_script`."""

from __future__ import annotations

import inspect
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dcp_base import CheckpointEvent, hookimpl
from dcp_core import plugins
from dcp_manager.manager import CheckpointManager
from dcp_prove.observing.batches import BatchWatch
from dcp_prove.observing.recorder import Recorder

_CHEAP_SECONDS = 0.2
_TIMEOUT_SECONDS = 30.0


def run_script(text: str) -> None:
    """Run and observe a script as the program of this process; `text` is a job as JSON."""
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
    def __init__(self, job: Mapping[str, Any]) -> None:
        self._folder = Path(job["records"])
        self._kill_at_save = job["kill_at_save"]
        self._kills = job["kills"]
        self._resumed = job["first_step"] is not None
        self._steps = job["first_step"] or 0
        self._rank, self._world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._full_at = {self._steps + 1} if self._resumed else set()
        self._saves = 0
        self._steps_at_save = 0
        self._announced: dict[str, int] = {}
        """Path of a manager's save → its number, until its events arrive."""
        self._wanted_operation: str | None = None
        self._last_seconds = 0.0
        watch = BatchWatch(self._before_forward)
        self._recorder = Recorder(self._folder / f"rank{self._rank}.jsonl", watch)
        self._watch = watch
        self._awaits: str | None = "restored" if self._resumed else None

    def start(self) -> None:
        self._watch.start()
        register_optimizer_step_post_hook(self._after_step)
        plugins.register(self, name="dcp-prove")
        begin, watcher = CheckpointManager._save, self  # noqa: SLF001 - it has no hook

        def begin_save(manager: CheckpointManager, step: int, *args: Any, **options: Any) -> Any:
            watcher._announced[str(manager.checkpoint_id(step))] = watcher._begin_save()
            return begin(manager, step, *args, **options)

        CheckpointManager._save = begin_save  # type: ignore[assignment,method-assign]  # noqa: SLF001

    def stop(self) -> None:
        self._recorder.close()
        plugins.unregister("dcp-prove")

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.operation != "save" or event.phase != "total":
            return
        if event.state == "started":
            name = str(event.checkpoint_id)
            number = self._announced.pop(name) if name in self._announced else self._begin_unannounced()
            if number == self._kill_at_save:
                self._wanted_operation = event.operation_id
        elif event.state == "finished" and self._kills and event.operation_id == self._wanted_operation:
            if event.world_size != self._world_size:
                _fail(f"rank {event.rank} saved alone; the proof on several ranks needs saves by all of them")
            self._recorder.record("killed", self._steps_at_save, [], full=False, reads=False)
            self._die()

    def _begin_unannounced(self) -> int:
        """Count a call of `save`, which only its events show."""
        if threading.current_thread() is not threading.main_thread():
            _fail("a save in the background whose call was not seen: save with a CheckpointManager(…, saver=…)")
        return self._begin_save()

    def _begin_save(self) -> int:
        self._saves += 1
        if self._saves == self._kill_at_save and not self._resumed:
            self._steps_at_save = self._steps
            self._full_at.add(self._steps + 1)
            self._awaits = "saved"
            self._watch.forget_trained()
        return self._saves

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
        """Kill this process once all ranks know that the checkpoint exists."""
        (self._folder / f"rank{self._rank}.published").touch()
        end = time.monotonic() + _TIMEOUT_SECONDS
        while len([*self._folder.glob("*.published")]) < self._world_size and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def _fail(text: str) -> NoReturn:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(1)


def _variables(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the variables of the script's module and of its running functions, the outermost first."""
    frames = []
    while frame is not None:
        if _is_users(frame):
            frames.append(frame)
        frame = frame.f_back
    found: list[dict[str, Any]] = []
    for each in reversed(frames):
        for variables in (_globals(each), each.f_locals):
            known = {name for group in found for name in group}
            found.append({name: value for name, value in variables.items() if name[:2] != "__" and name not in known})
    return found


def _globals(frame: FrameType) -> dict[str, Any]:
    return frame.f_globals if frame.f_globals.get("__name__") == "__main__" else {}


def _is_users(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    top = name.partition(".")[0]
    if file.startswith("<") or f"{os.sep}site-packages{os.sep}" in file:
        return False
    return not (top in sys.stdlib_module_names or top.startswith("dcp_") or top == "torch")


def _loss(variables: Sequence[Mapping[str, Any]]) -> float | None:
    value = next((group["loss"] for group in reversed(variables) if "loss" in group), None)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None
