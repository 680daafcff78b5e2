"""Main program of a rank of `prove_resume`."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_prove.observing.batches import BatchWatch
from dcp_prove.observing.recorder import Recorder
from dcp_prove.trainer import check_trainer, read_step


def run_rank(text: str) -> None:
    """Run a rank's part of one run; `text` is a job as JSON."""
    job = json.loads(text)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    make_trainer = _unpickle(job)
    if world_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
        dist.init_process_group(job["backend"])
    watch = BatchWatch()
    watch.start()
    recorder = Recorder(Path(job["records"]) / f"rank{rank}.jsonl", watch)
    trainer = make_trainer(job["root"])
    check_trainer(trainer)
    try:
        _train(trainer, recorder, job)
    finally:
        recorder.close()
    if world_size > 1:
        dist.barrier()  # another rank may still be in its last step
        dist.destroy_process_group()


def _train(trainer: Any, recorder: Recorder, job: dict[str, Any]) -> None:
    roots, first = [{"trainer": trainer}], job["first_step"]
    recorder.record("made", 0, [], full=False)  # forgets the batches that were read meanwhile
    if first:
        trainer.restore()
        recorder.record("restored", first, roots, full=True)
    for step in range(first + 1, job["steps"] + 1):
        loss, samples = read_step(trainer.step())
        recorder.record("step", step, roots, full=step in job["full_at"], loss=loss, samples=samples)
        if step in job["save_at"]:
            trainer.save()
            recorder.record("saved", step, roots, full=True)
            if step == job["kill_at"]:
                if dist.is_initialized():
                    dist.barrier()  # another rank may still be saving
                os.kill(os.getpid(), signal.SIGKILL)


def _unpickle(job: dict[str, Any]) -> Any:
    sys.path[:] = job["sys_path"]
    for name, file in job["modules"].items():
        _load_module(name, file)
    return pickle.loads(base64.b64decode(job["make_trainer"]))


def _load_module(name: str, file: str) -> None:
    """Load a module of the caller from its file, unless the import system finds that file."""
    if name == "__main__":
        name, spec = "__mp_main__", importlib.util.spec_from_file_location("__mp_main__", file)
    else:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is not None and spec.origin is not None and os.path.samefile(spec.origin, file):
            return
        spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"the module of make_trainer, {file}, cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if name == "__mp_main__":
        sys.modules["__main__"] = module
    spec.loader.exec_module(module)
