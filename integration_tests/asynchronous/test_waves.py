"""Saves in waves on real ranks: the values of a synchronous save, within the memory; failures in a wave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_async import AsyncSaver, SaverOptions
from dcp_core import load, save
from dcp_fs import FileSystemWriter
from dcp_io.requests import Payload
from dcp_ranks.testing.ranks import RankPool
from integration_tests.asynchronous import scripts
from integration_tests.launcher import launcher_store, rank_environment

BUDGET = 2 << 20
ROOT = Path(__file__).resolve().parents[2]


class _Breaking:
    """Passes on some pieces of a tensor, and then does something."""

    def __init__(self, data: Any, what: str) -> None:
        self.nbytes, self._data, self._what = data.nbytes, data, what

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for number, piece in enumerate(self._data.pieces(max_bytes)):
            if number == 3:
                _break(self._what)
            yield piece


def _break(what: str) -> None:
    if what == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "trainer":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)  # this process ends with it
    raise OSError(28, "No space left on device")


class _BreakingRequest:
    def __init__(self, request: Any, what: str) -> None:
        self._request, self._what = request, what
        self.key, self.cost_bytes = request.key, request.cost_bytes
        self.alike = request.alike

    def resolve(self) -> Payload:
        payload: Payload = self._request.resolve()
        payload.data = _Breaking(payload.data, self._what)
        return payload


class BreakingWriter(FileSystemWriter):
    """Writes one tensor of one rank until its fourth piece."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path)
        self.what = what

    def _write(self, requests: Any, placement: Any) -> Any:
        requests = [_BreakingRequest(one, self.what) if one.key == "own.1.2" else one for one in requests]
        return super()._write(requests, placement)


def _state(number: float) -> dict[str, Any]:
    """Rank 1 has 12 MiB, rank 0 has 1 MiB; both have parts of 8 MiB, and replicas of 4 MiB. `own.1.2` never fits."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = [1 << 18, 1 << 18, 1 << 19, *[1 << 18] * 8] if rank else [1 << 18]
    own = {f"own.{rank}.{n}": torch.arange(float(size)) + n + number for n, size in enumerate(sizes)}
    parts = distribute_tensor(torch.arange(float(1 << 21)).reshape(1 << 9, -1) * (1 + number), mesh, [Shard(0)])
    return {**own, "parts": parts, "both": torch.arange(float(1 << 20)) + number, "nested": {"small": torch.ones(3)}}


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    flat = {**state, "small": state["nested"]["small"]}
    del flat["nested"]
    return {key: getattr(value, "_local_tensor", value).clone() for key, value in flat.items()}


def _loaded(folder: str) -> dict[str, torch.Tensor]:
    found = _state(-1)
    load(found, checkpoint_id=folder)
    return _flat(found)


def _same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in two)


def _saved(folder: str, kind: str) -> tuple[bool, bool, int]:
    """Whether both checkpoints are the state at the moment of the call, and the memory that was taken."""
    options = SaverOptions(max_staging_bytes=BUDGET, staging="waves")
    with AsyncSaver(kind, options=options) as saver:
        for number in range(2):
            state = _state(number)
            expected = _flat(state)
            save(state, checkpoint_id=f"{folder}/plain")
            future: Any = saver.save(state, checkpoint_id=f"{folder}/waves")
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            future.result(120)
        return (_same(_loaded(f"{folder}/plain"), expected), _same(_loaded(f"{folder}/waves"), expected),
                saver.staging_bytes)  # fmt: skip


@pytest.mark.parametrize("kind", [pytest.param("thread", marks=pytest.mark.slow), "process"])
def test_the_values_of_a_synchronous_save_on_ranks_of_other_sizes(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _saved, str(tmp_path), kind, timeout_seconds=280) == [(True, True, BUDGET)] * 2


def _broken(folder: str, kind: str, what: str) -> tuple[str, bool, bool]:
    """What a save raises that breaks on rank 1 in a wave, and whether the old and a later checkpoint are there."""
    options = SaverOptions(max_staging_bytes=BUDGET, staging="waves")
    with AsyncSaver(kind, options=options) as saver:
        saver.save(_state(1), checkpoint_id=folder).result(120)  # type: ignore[union-attr]
        error = saver.save(_state(2), storage_writer=BreakingWriter(folder, what)).exception(120)  # type: ignore[union-attr]
        dist.barrier()
        before = _same(_loaded(folder), _flat(_state(1)))
        dist.barrier()
        saver.save(_state(3), checkpoint_id=folder).result(120)  # type: ignore[union-attr]
    return f"{type(error).__name__}: {error}", before, _same(_loaded(folder), _flat(_state(3)))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("thread", "disk"),
        pytest.param("process", "disk", marks=pytest.mark.slow),
        pytest.param("process", "worker", marks=pytest.mark.slow),
    ],
)
def test_a_failure_in_a_wave_leaves_the_old_checkpoint(ranks: RankPool, tmp_path: Path, kind: str, what: str) -> None:
    found = ranks.run(2, _broken, str(tmp_path / "checkpoint"), kind, what, timeout_seconds=280)
    for rank, (told, before, after) in enumerate(found):
        assert (before, after) == (True, True)
        if what == "disk":
            assert "No space left on device" in told
        else:
            assert ("WorkerLostError" if rank == 1 else "PeerLostError") in told


KILLED = """
import torch
import torch.distributed as dist
from dcp_async import AsyncSaver, SaverOptions
from integration_tests.asynchronous import test_waves

dist.init_process_group("gloo")
options = SaverOptions(max_staging_bytes=test_waves.BUDGET, staging="waves")
saver = AsyncSaver("process", options=options)
saver.save(test_waves._state(1), checkpoint_id="checkpoint").result(120)
writer = test_waves.BreakingWriter("checkpoint", "trainer")
print(repr(saver.save(test_waves._state(2), storage_writer=writer).exception(120)), flush=True)
import os
os._exit(0)  # not by way of the group, whose other rank is gone
"""


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_wave(ranks: RankPool, tmp_path: Path) -> None:
    store, path = launcher_store(), tmp_path / "trainer.py"
    path.write_text(KILLED)
    started = [
        subprocess.Popen(
            [sys.executable, str(path)],
            cwd=tmp_path,
            env={**scripts.ENVIRONMENT, **rank_environment(rank, 2, store.port), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told, _ = started[0].communicate(timeout=280)
        started[1].communicate(timeout=280)
    finally:
        for process in started:
            process.kill()
    assert "PeerLostError" in told
    assert started[1].returncode == -signal.SIGKILL
    assert ranks.run(2, _is_first, str(tmp_path / "checkpoint")) == [True, True]


def _is_first(folder: str) -> bool:
    return _same(_loaded(folder), _flat(_state(1)))


MEMORY = """
import os
import torch
from dcp_async import AsyncSaver, SaverOptions

def fields(pid):
    found = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return {name: int(found[name].split()[0]) // 1024 for name in ("VmRSS", "VmHWM")}

MIB = 1 << 20
state = {f"p{n}": torch.ones(2 * MIB) for n in range(32)}
small = {"p": torch.ones(MIB // 4)}
options = SaverOptions(max_staging_bytes=32 * MIB, staging="waves", copy_threads=2)
with AsyncSaver("KIND", options=options) as saver:
    saver.save(small, checkpoint_id="small").result()
    worker = saver.backend.worker.pid if "KIND" == "process" else os.getpid()
    before = [fields(pid)["VmRSS"] for pid in (os.getpid(), worker)]
    for pid in (os.getpid(), worker):
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")
    saver.save(state, checkpoint_id="large").result()
    after = [fields(pid)["VmHWM"] for pid in (os.getpid(), worker)]
print(*[peak - rest for peak, rest in zip(after, before, strict=True)])
"""


@pytest.mark.parametrize("kind", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_the_peak_of_memory_is_that_of_the_budget(tmp_path: Path, kind: str) -> None:
    """A state of 256 MiB with 32 MiB for copies; what else a save takes is below 32 MiB. In both, copies are shared."""
    done = scripts.run(MEMORY.replace("KIND", kind), tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(int(grown) < 64 for grown in done.stdout.split()), done.stdout
