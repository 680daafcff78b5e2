"""One rank of the run: resumes, then saves each step that it is told to. Run by `life` as `python -m`.

A command per line of stdin, answers on stdout, both JSON. That a save has succeeded is said when its future says so.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute

__all__ = ["KEEP", "main"]

KEEP = 3
ROWS, COLUMNS = 240, 256
GROUP_SECONDS = 60.0


def values(step: int) -> dict[str, torch.Tensor]:
    """Whole values of a step; no two steps share one."""
    maker = torch.Generator().manual_seed(step)
    return {"weight": torch.randn(ROWS, COLUMNS, generator=maker), "bias": torch.full((17,), float(step))}


def state(step: int) -> dict[str, Any]:
    """The values as this rank holds them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = values(step)
    sharded = distribute(whole["weight"], mesh, [Shard(0)])
    return {"model": {"weight": sharded, "bias": whole["bias"]}, "step": step}


def is_step(found: dict[str, Any], step: int) -> bool:
    """Whether loaded values are exactly those of a step."""
    wanted = state(step)
    local: Callable[[Any], torch.Tensor] = lambda value: value.to_local() if isinstance(value, DTensor) else value  # noqa: E731
    same = [torch.equal(local(found["model"][name]), local(wanted["model"][name])) for name in wanted["model"]]
    return all(same) and bool(found["step"] == step)


def main() -> None:
    """Serve commands until told to end."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    lock = threading.Lock()

    def answer(**message: Any) -> None:
        with lock:
            print(json.dumps(message), file=answers, flush=True)

    timeout = timedelta(seconds=GROUP_SECONDS)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    options = dcp.SaverOptions(timeout_seconds=GROUP_SECONDS, save_timeout_seconds=GROUP_SECONDS)
    with dcp.AsyncSaver(os.environ["DCP_SOAK_SAVER"], options=options) as saver:
        manager = dcp.CheckpointManager(
            os.environ["DCP_SOAK_ROOT"],
            saver=saver,
            keep_policy=dcp.KeepLast(KEEP),
            timeout_seconds=GROUP_SECONDS,
        )
        template = state(0)
        restored = manager.restore(template)
        step = None if restored is None else restored.step
        passed_over = [] if restored is None else [str(each) for each in restored.passed_over]
        answer(restored=step, intact=step is None or is_step(template, step), passed_over=passed_over)
        for line in sys.stdin:
            if not _serve(json.loads(line), manager, answer):
                break
    dist.destroy_process_group()
    answer(ended=True)


def _serve(command: dict[str, Any], manager: dcp.CheckpointManager, answer: Callable[..., None]) -> bool:
    """Carry out a command; whether there may be more."""
    try:
        if command["do"] == "save":
            _save(command["step"], manager, answer)
        else:
            manager.wait()
            answer(done=command["do"], **_resources())
    except Exception as error:  # noqa: BLE001 - the run goes on; the model says whether it may fail
        answer(done=command["do"], failed=f"{type(error).__name__}: {error}"[:500], **_resources())
    return bool(command["do"] != "end")


def _save(step: int, manager: dcp.CheckpointManager, answer: Callable[..., None]) -> None:
    future = manager.save(step, lambda: state(step))
    assert future is not None

    def ended(done: Future[Any]) -> None:
        error = done.exception()
        answer(step=step, saved=error is None, why=None if error is None else f"{type(error).__name__}: {error}"[:300])

    future.add_done_callback(ended)
    answer(done="save", **_resources())


def _resources() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return {
        "resident_kib": resident,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main()
