"""One rank of the asynchronous benchmark: `python -m integration_tests.benchmarks.async_rank '{"saver": ...}'`.

Prints figures as one line of JSON. Knows nothing of the other contenders.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from integration_tests.benchmarks.async_savers import Saver, State, memcpy_of, saver

__all__ = ["main"]

BASELINE_SECONDS = 2.0
KEPT = 2


def state_of(rank: int, tensors: int, mib: int) -> dict[str, torch.Tensor]:
    """So many tensors of 1 KiB, and so many MiB in 16 large ones."""
    small = {f"rank{rank}.small.{number}": torch.randn(256) for number in range(tensors)}
    large = {f"rank{rank}.large.{number}": torch.randn(mib * (1 << 18) // 16) for number in range(16 if mib else 0)}
    return {**small, **large}


class Training:
    """A small training loop in one thread: many short operations, as optimizers have."""

    def __init__(self) -> None:
        self._model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(8)))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._batch = torch.randn(64, 128)

    def step(self) -> float:
        """One step; its seconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        return time.perf_counter() - start

    def steps(self, until: Callable[[], object]) -> list[float]:
        """Steps until something is true."""
        taken = []
        while not until():
            taken.append(self.step())
        return taken


def beside_training(save: Saver, state: State, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """Rounds of a save beside a training loop, within the same window for every contender."""
    training, found = Training(), []
    training.steps(_after(1.0))
    for number in range(options["rounds"] + 1):
        target = _fresh(folder, number)
        dist.barrier()
        typical = statistics.median(training.steps(_after(BASELINE_SECONDS)))
        dist.barrier()
        start = time.perf_counter()
        future = save(state, str(target))
        blocked = ended = time.perf_counter() - start
        done: list[float] = []
        future.add_done_callback(_noting(done, start))
        window = options["window"] or None
        left = None if window is None else window - (time.perf_counter() - start)
        steps = training.steps(done.__len__ if left is None else _after(left))
        future.result()
        ended = done[0] if done else time.perf_counter() - start
        lost = blocked + sum(step - typical for step in steps)
        if number:  # the first starts what has to be started
            worst = max(steps) - typical
            found.append({"blocked": blocked, "lost": lost, "worst": worst, "save": ended, "step": typical})
    return found


def alone(save: Saver, state: State, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """Rounds of a save with nothing beside it: until it returns, until it is done, and one parallel memcpy."""
    copy = memcpy_of([*state.values()], options["threads"])
    copy()
    found = []
    for number in range(options["rounds"] + 1):
        target = _fresh(folder, number)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        future = save(state, str(target))
        returned = time.perf_counter() - start
        future.result()
        ended = time.perf_counter() - start
        start = time.perf_counter()
        copy()
        found.append({"returned": returned, "save": ended, "memcpy": time.perf_counter() - start})
    return found


def main(text: str) -> None:
    """Run one contender in one scenario."""
    options = json.loads(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = state_of(dist.get_rank(), options["tensors"], options["mib"])
    folder = Path(options["folder"])
    scenario = {"beside training": beside_training, "alone": alone}[options["scenario"]]
    with saver(options["saver"], warm=state if options.get("warm") else None) as save:
        found = scenario(save, state, folder, options)
    print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # stock's process is not waited for


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _noting(done: list[float], start: float) -> Callable[[object], None]:
    return lambda _: done.append(time.perf_counter() - start)


def _fresh(folder: Path, number: int) -> Path:
    """A new folder; the ones before the last are removed, so that the disk does not fill."""
    if dist.get_rank() == 0:
        shutil.rmtree(folder / str(number - KEPT), ignore_errors=True)
    return folder / str(number)


if __name__ == "__main__":
    main(sys.argv[1])
