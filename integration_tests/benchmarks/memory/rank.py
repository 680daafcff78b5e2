"""The program of one rank: saves into keepers, loads from them, trains beside them; prints what it took, as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader as stock
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_all as dcp
import dcp_exchange.together  # noqa: F401 - the first load imports it otherwise: imports are shown apart
from dcp_memory import partner
from integration_tests.benchmarks.async_rank import Training

__all__ = ["MIB", "MODULE", "tiers_of"]

MODULE = "integration_tests.benchmarks.memory.rank"
MIB = 1 << 20
_COLUMNS = 1024
_TENSORS = 8
_CUT_BYTES = 4 * MIB
_WARM_UP = 2
State = dict[str, Any]
Found = dict[str, Any]


def tiers_of(task: Mapping[str, Any]) -> dcp.Tiers:
    """The keepers of all hosts, with copies on the next host if the task says so, and a limit of their rate."""
    copies = partner(rate_bytes_per_second=task.get("rate")) if task.get("copies") else None
    return dcp.Tiers([dcp.Tier(f"keeper://{task['run']}", per_host=True, keep=dcp.KeepLast(2), copies=copies)])


@contextlib.contextmanager
def _manager_of(task: Mapping[str, Any]) -> Iterator[dcp.CheckpointManager]:
    """A manager whose saver has a process of its own."""
    saver: Any
    with dcp.AsyncSaver("process") as saver, dcp.CheckpointManager(tiers_of(task), saver=saver) as manager:
        yield manager


def _make_state(mib: float, value: float | None) -> State:
    """This rank's part of tensors that are sharded by rows, `mib` in all; without a value it is untouched memory."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = int(mib * MIB / 4 / _COLUMNS / _TENSORS)
    state = {}
    for number in range(_TENSORS):
        local = torch.empty(rows, _COLUMNS)
        if value is not None:
            local.fill_(value + number).add_(torch.arange(_COLUMNS)).add_(1000.0 * dist.get_rank())
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    return state


def _is(state: State, mib: float, value: float) -> bool:
    wanted = _make_state(mib, value)
    return all(torch.equal(each.to_local(), wanted[key].to_local()) for key, each in state.items())


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], threads: int) -> None:
    """One memcpy of all tensors, by several threads."""
    cut = _CUT_BYTES // 4
    pieces = [
        pair
        for source, target in zip(sources, targets, strict=True)
        for pair in zip(torch.split(source.view(-1), cut), torch.split(target.view(-1), cut), strict=True)
    ]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda pair: pair[1].copy_(pair[0]), pieces))


def _locals(state: State) -> list[torch.Tensor]:
    return [each.to_local() for each in state.values()]


def _save(task: Mapping[str, Any]) -> Found:
    """Save some steps, each of which is protected before the next one if there are copies."""
    for step in range(1, task["steps"] + 1):
        with _manager_of(task) as manager:  # whose end waits for the copies
            manager.save(step, _make_state(task["mib"], step))
    return {}


def _save_to_storage(task: Mapping[str, Any]) -> Found:
    dcp.save(_make_state(task["mib"], task["step"]), checkpoint_id=task["place"])
    return {}


def _load(task: Mapping[str, Any]) -> Found:
    """Load from the keepers; with `only`, the ranks of one host alone want anything."""
    wants = task.get("only") is None or os.environ["HOST"] == str(task["only"])
    peers = dcp.PeerOptions(network=task["network"]) if task.get("network") else None
    place = tiers_of(task).find(task["step"])
    return _time(task, lambda state: dcp.load(state, checkpoint_id=place, peers=peers).bytes_received, wants=wants)


def _load_by_stock(task: Mapping[str, Any]) -> Found:
    def load(state: State) -> int:
        stock.load(state, storage_reader=FsspecReader(task["place"]))
        return 0

    return _time(task, load)


def _time(task: Mapping[str, Any], load: Callable[[State], int], *, wants: bool = True) -> Found:
    """Time a load into untouched memory, and then a memcpy of as many bytes into untouched memory."""
    state = _make_state(task["mib"], None) if wants else {}
    started = time.clock_gettime(time.CLOCK_BOOTTIME) - _started_seconds()
    dist.barrier()
    begin = time.monotonic()
    received = load(state)
    end = time.monotonic()
    right = not state or _is(state, task["mib"], task["step"])
    sources = _locals(_make_state(task["mib"], 0.0))
    dist.barrier()
    targets = [torch.empty_like(source) for source in sources]
    copying = time.monotonic()
    _copy(sources, targets, task["threads"])
    memcpy = time.monotonic() - copying
    return {"begin": begin, "end": end, "memcpy": memcpy, "right": right, "start": started, "received": received}


def _started_seconds() -> float:
    """When this process was started, seconds since the machine was."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _block(task: Mapping[str, Any]) -> Found:
    """How long saves hold the trainer up, all ranks at once, and one memcpy into touched memory in turn with each."""
    state = _make_state(task["mib"], 0.0)
    sources = _locals(state)
    targets = [source.clone() for source in sources]
    blocked, copied = [], []
    with _manager_of(task) as manager:
        for step in range(1, _WARM_UP + task["rounds"] + 1):
            dist.barrier()
            begin = time.perf_counter()
            manager.save(step, state)
            returned = time.perf_counter() - begin
            manager.wait()
            dist.barrier()
            begin = time.perf_counter()
            _copy(sources, targets, task["threads"])
            if step > _WARM_UP:
                blocked.append(returned)
                copied.append(time.perf_counter() - begin)
    return {"blocked": blocked, "memcpy": copied}


def _train(task: Mapping[str, Any]) -> Found:
    """Times of a fixed number of training steps beside a save, with and without copies on the other host, in turns.

    The turns are next to each other in one process: what other machines' loads do to these times, they do to both.
    """
    state, training = _make_state(task["mib"], 0.0), Training()
    training.steps(_after(2.0))
    typical = statistics.median(training.step() for _ in range(200))
    # The same number on all ranks, so that they train side by side to the end of a round.
    count = torch.tensor(int(task["seconds"] / typical))
    dist.all_reduce(count, dist.ReduceOp.MIN)
    found: Found = {"taken": {"with": [], "without": []}, "waited": {"with": [], "without": []}, "steps": int(count)}
    with _manager_of({**task, "copies": False}) as plain, _manager_of({**task, "copies": True}) as copying:
        turns = [("without", plain), ("with", copying)]
        for turn in range(_WARM_UP + task["rounds"]):
            for number, (name, manager) in enumerate(turns[:: 1 if turn % 2 else -1]):
                dist.barrier()
                begin, ran = time.perf_counter(), time.thread_time()
                manager.save(1 + 2 * turn + number, state)
                for _ in range(int(count)):
                    training.step()
                taken, ran = time.perf_counter() - begin, time.thread_time() - ran
                if turn >= _WARM_UP:
                    found["taken"][name].append(taken)
                    found["waited"][name].append(taken - ran)
                manager.wait()
    return found


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


_ACTIONS: Mapping[str, Callable[[Mapping[str, Any]], Found]] = {
    "save": _save,
    "save to storage": _save_to_storage,
    "load": _load,
    "load by stock": _load_by_stock,
    "block": _block,
    "train": _train,
}


def main(given: Sequence[str]) -> None:
    """Be one rank: do what the task says."""
    task = json.loads(given[0])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = _ACTIONS[task["action"]](task)
    dist.barrier()
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
