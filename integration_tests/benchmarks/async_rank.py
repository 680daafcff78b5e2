"""One rank of the asynchronous benchmark: `python -m integration_tests.benchmarks.async_rank '{"saver": ...}'`.

Prints figures as one line of JSON. Knows nothing of the other contenders.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
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
    """Rounds of a save beside a training loop: what is lost until it is done, within the same window at least."""
    training, found = Training(), []
    training.steps(_after(1.0))
    for number in range(options["rounds"] + 1):
        target = _fresh(folder, number)
        dist.barrier()
        alone = training.steps(_after(BASELINE_SECONDS))
        typical = statistics.median(alone)
        dist.barrier()
        start = time.perf_counter()
        future = save(state, str(target))
        blocked = time.perf_counter() - start
        done: list[float] = []
        future.add_done_callback(_noting(done, start))
        over = _after(options["window"] - blocked)
        steps = training.steps(lambda done=done, over=over: done and over())  # type: ignore[misc]
        future.result()
        lost = blocked + sum(step - typical for step in steps)
        if number:  # the first starts what has to be started
            worst, without = max(steps) - typical, max(alone) - typical
            figures = {"blocked": blocked, "lost": lost, "worst": worst, "worst without": without}
            found.append({**figures, "save": done[0], "step": typical})
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
        figures = {"returned": returned, "save": ended, "memcpy": time.perf_counter() - start}
        told = getattr(save, "message_bytes", None)
        if told is not None:
            figures["message bytes"] = told()
        found.append(figures)
    return found


def many(save: Saver, state: State, folder: Path, options: dict[str, Any]) -> list[dict[str, float]]:
    """What this process and its children hold more after many saves than after the first of them."""
    held: list[dict[str, float]] = []
    for number in range(options["saves"]):
        save(state, str(folder / str(number % KEPT))).result()
        if number in (options["saves"] // 5, options["saves"] - 1):
            gc.collect()
            held.append(_holds())
    return [{name: held[1][name] - held[0][name] for name in held[0]}]


def few_descriptors(save: Saver, state: State, folder: Path, options: dict[str, Any]) -> list[dict[str, str]]:
    """Whether two saves work with that many descriptors, or what goes wrong."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (options["descriptors"], hard))
    try:
        for number in range(2):
            save(state, str(folder / str(number))).result(timeout=300)
    except BaseException as error:  # noqa: BLE001 - the worse, the more it says
        return [{"told": f"{type(error).__name__}: {str(error).splitlines()[0][:140] if str(error) else ''}"}]
    return [{"told": "saved"}]


def _holds() -> dict[str, float]:
    """Memory and descriptors of this process and its children."""
    figures = dict.fromkeys(("resident MiB", "shared MiB", "descriptors"), 0.0)
    for pid in _family(os.getpid()):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        for name, field in (("resident MiB", "VmRSS"), ("shared MiB", "RssShmem")):
            figures[name] += int(fields.get(field, "0").split()[0]) / 1024
        figures["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
    return figures


def _family(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    below = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(each for child in below for each in _family(child))]


def main(text: str) -> None:
    """Run one contender in one scenario."""
    options = json.loads(text)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = state_of(dist.get_rank(), options["tensors"], options["mib"])
    folder = Path(options["folder"])
    scenario: Callable[..., Any] = SCENARIOS[options["scenario"]]
    if scenario is alone:
        _touch_page_cache(folder, KEPT * options["mib"])
    with saver(options["saver"], warm=state if options.get("warm") else None) as save:
        found = scenario(save, state, folder, options)
    print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # stock's process is not waited for


def _touch_page_cache(folder: Path, mib: int) -> None:
    """Have memory for the files of all saves: a virtual machine waits for what its host has not given it before."""
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(mib):
            file.write(bytes(1 << 20))


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


SCENARIOS = {"beside training": beside_training, "alone": alone, "many": many, "few descriptors": few_descriptors}

if __name__ == "__main__":
    main(sys.argv[1])
