"""What ends up in the checkpoint: the values at the call, of every kind of state, whoever plans and writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_async import (
    AsyncSaver,
    AsyncSaveResponse,
    DefaultStager,
    SaverOptions,
    StagingOptions,
    WorkerError,
    WorkerOptions,
)
from dcp_async.queue.jobs import SaveFuture
from dcp_async.saver import shared_saver
from dcp_core import DefaultSavePlanner, Metadata, PerRank, SavePlan, load, save
from dcp_core.records.protocols import StorageWriter, WriteResult
from dcp_ranks.testing.ranks import RankPool

KINDS = ["thread", "process"]
# With the start of a process for each rank, which imports torch.
PATIENCE_SECONDS = 200.0


@pytest.fixture(scope="module")
def savers() -> Iterator[dict[str, AsyncSaver]]:
    """A saver of each kind for all tests of this process: the worker is started once."""
    with AsyncSaver("thread") as thread, AsyncSaver("process") as process:
        yield {"thread": thread, "process": process}


def _state() -> dict[str, Any]:
    base = torch.arange(100.0)
    return {
        "model": {"base": base, "view": base[10:20], "column": torch.arange(12.0).reshape(3, 4)[:, 1]},
        "list": [torch.ones(2, dtype=torch.bfloat16), {"deep": 1}],
        "tuple": (1, "two"),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "conj": torch.tensor([1 + 2j]).conj(),
        "expanded": torch.ones(1).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        "step": 7,
        "rng": PerRank(torch.arange(3)),
        "none": {},
    }


def _same(found: Any, wanted: Any) -> bool:
    if isinstance(found, PerRank):
        return _same(found.value, wanted.value)
    if isinstance(found, DTensor):
        return _same(found.to_local(), wanted.to_local())
    if isinstance(found, torch.Tensor):
        return torch.equal(
            found.dequantize() if found.is_quantized else found, wanted.dequantize() if wanted.is_quantized else wanted
        )
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(_same(found[key], wanted[key]) for key in found)
    if isinstance(found, list | tuple):
        return len(found) == len(wanted) and all(map(_same, found, wanted))
    return bool(found == wanted)


def _spoil(value: Any) -> Any:
    """Other values in the same places."""
    if isinstance(value, PerRank):
        _spoil(value.value)
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, int):
                value[key] = -1
            else:
                _spoil(item)
    elif isinstance(value, torch.Tensor) and not value.is_quantized and not value.is_conj() and value.numel():
        with torch.no_grad():
            local = value.to_local() if isinstance(value, DTensor) else value
            local.copy_(torch.zeros_like(local)) if 0 not in local.stride() else None
    return value


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_value_as_it_was_at_the_call(savers: dict[str, AsyncSaver], tmp_path: Path, kind: str) -> None:
    state, wanted = _state(), _state()
    future = savers[kind].save(state, checkpoint_id=tmp_path / "ours")
    _spoil(state)
    metadata = future.result()  # type: ignore[union-attr]
    expected = save(_state(), checkpoint_id=tmp_path / "sync")
    found = {**_spoil(_state()), "expanded": torch.zeros(5)}  # an expanded tensor cannot be loaded into
    load(found, checkpoint_id=tmp_path / "ours")
    assert _same(found, wanted)
    assert metadata.state_dict_metadata == expected.state_dict_metadata
    assert metadata.planner_data == expected.planner_data


def _sharded(folder: str, kind: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(35.0).reshape(7, 5)

    def make() -> dict[str, Any]:
        shards = {f"shard{dim}": distribute_tensor(whole.clone(), mesh, [Shard(dim)]) for dim in (0, 1)}
        both = {
            "list": [distribute_tensor(whole.clone(), mesh, [Replicate()])],
            "rng": PerRank(torch.full((2,), dist.get_rank())),
        }
        return {**shards, **both, "step": 1, "plain": torch.ones(3)}

    state = make()
    saver = shared_saver(kind)
    ok = True
    for number in range(3):
        state["step"] = number
        future = saver.save(state, checkpoint_id=folder)
        kept = state
        state = _spoil(make())
        future.result(timeout=PATIENCE_SECONDS)  # type: ignore[union-attr]
        found = make()
        _spoil(found)
        load(found, checkpoint_id=folder)
        wanted = {**make(), "step": number}
        ok = ok and _same(found, wanted)
        state = make()
        del kept
    return ok


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded_tensors(ranks: RankPool, tmp_path: Path, kind: str, world_size: int) -> None:
    assert all(ranks.run(world_size, _sharded, str(tmp_path), kind))


def _sub_groups(folder: str, kind: str) -> list[float]:
    """Two disjoint groups save at once, then everybody alone, then all together."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, saver = rank // 2, shared_saver(kind)
    state = {f"w{rank}": torch.full((5,), float(rank)), "g": torch.full((2,), float(mine))}
    futures = [
        saver.save(state, checkpoint_id=f"{folder}/group{mine}", process_group=groups[mine]),
        saver.save(state, checkpoint_id=f"{folder}/alone{rank}", no_dist=True),
        saver.save({f"w{rank}": state[f"w{rank}"]}, checkpoint_id=f"{folder}/all"),
    ]
    for future in futures:
        future.result(timeout=PATIENCE_SECONDS)  # type: ignore[union-attr]
    dist.barrier()
    values = []
    for name in (f"group{mine}", f"alone{rank}", "all"):
        found = {f"w{rank}": torch.zeros(5)}
        load(found, checkpoint_id=f"{folder}/{name}", no_dist=True)
        values.append(found[f"w{rank}"][0].item())
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_sub_groups_and_alone(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(4, _sub_groups, str(tmp_path), kind) == [[float(rank)] * 3 for rank in range(4)]


class Doubling(DefaultSavePlanner):
    """Writes something else than it holds, and looks at what no worker has."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        assert all(not isinstance(value, bytes) for value in state_dict.values())
        self.saw = sorted(type(value).__name__ for value in state_dict.values())
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - stock's name
        found = super().transform_object(write_item, object)
        return found * 2 if isinstance(found, torch.Tensor) else found


def _custom_planner(folder: str, kind: str) -> tuple[float, float, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"d": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]), "p": torch.ones(3), "n": 5}
    planner = Doubling()
    future = shared_saver(kind).save(state, checkpoint_id=folder, planner=planner)
    future.result(timeout=PATIENCE_SECONDS)  # type: ignore[union-attr]
    assert planner.saw == ["DTensor", "Tensor", "int"]
    found: dict[str, Any] = {"d": torch.zeros(4, 2), "p": torch.zeros(3), "n": 0}
    load(found, checkpoint_id=folder, no_dist=True)
    return found["d"].sum().item(), found["p"].sum().item(), found["n"]


@pytest.mark.parametrize("kind", KINDS)
def test_planners_of_the_callers_own_see_their_values(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _custom_planner, str(tmp_path), kind) == [(16.0, 6.0, 5)] * 2


class OneFile(StorageWriter):
    """A writer as users write them, of all ranks into one file; with collectives, if it is told to."""

    def __init__(self, path: str, *, collectives: bool = False) -> None:
        self.path, self.collectives, self.callback = path, collectives, None

    def reset(self, checkpoint_id: Any = None) -> None:
        self.path = checkpoint_id or self.path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        self.sum = torch.zeros(1)
        for item in plan.items:
            value = planner.resolve_data(item)
            self.sum += value.sum() if isinstance(value, torch.Tensor) else 0
        if self.collectives:
            dist.all_reduce(self.sum)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result([WriteResult(item.index, 1, self.sum.item()) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: Any) -> None:
        Path(self.path).write_text(str(self.sum.item()))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@pytest.mark.parametrize("kind", KINDS)
def test_writers_of_others(savers: dict[str, AsyncSaver], tmp_path: Path, kind: str) -> None:
    writer = OneFile(str(tmp_path / "sum"))
    metadata = savers[kind].save({"w": torch.ones(3)}, storage_writer=writer).result()  # type: ignore[union-attr]
    assert list(metadata.state_dict_metadata) == ["w"]
    assert (tmp_path / "sum").read_text() == "3.0"


def _with_collectives(path: str) -> list[str]:
    told = []
    options = SaverOptions(worker=WorkerOptions(process_group=True))
    with AsyncSaver("process", options=options) as saver:
        for number in (1, 2):
            state = {f"w{dist.get_rank()}": torch.ones(3 * number)}
            writer = OneFile(path, collectives=True)
            saver.save(state, storage_writer=writer).result(timeout=PATIENCE_SECONDS)  # type: ignore[union-attr]
            dist.barrier()
            told.append(Path(path).read_text())
            dist.barrier()
            if number == 1 and dist.get_rank() == 1:
                worker = saver.backend.worker  # type: ignore[attr-defined]
                worker.kill()
                worker.settle()  # only when its end has been told may the others begin the next save
            dist.barrier()
    return told


def test_writers_with_collectives_get_a_group_in_the_worker(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _with_collectives, str(tmp_path / "sum")) == [["6.0", "12.0"]] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_stagers_that_give_futures(savers: dict[str, AsyncSaver], tmp_path: Path, kind: str) -> None:
    state = {"w": torch.ones(1 << 20), "step": 1}
    answer = savers[kind].save(state, checkpoint_id=tmp_path, async_stager=DefaultStager(StagingOptions()))
    assert isinstance(answer, AsyncSaveResponse)
    with savers[kind].lock():
        state["w"].zero_()
    assert answer.staging_completion.result() is None
    answer.upload_completion.result()
    found = {"w": torch.zeros(1 << 20), "step": 0}
    load(found, checkpoint_id=tmp_path)
    assert found["w"].min() == 1


def test_later_saves_send_an_identifier_and_changed_scalars(savers: dict[str, AsyncSaver], tmp_path: Path) -> None:
    state: dict[str, Any] = {f"p{number}": torch.ones(8) for number in range(1000)}
    sent = []
    saver: Any = savers["process"]
    saver.warm_up()
    before = saver.backend.worker.bytes_sent
    for number in range(4):
        state["step"] = number
        saver.save(state, checkpoint_id=tmp_path / str(number % 2)).result()
        sent.append(saver.backend.worker.bytes_sent - before)
    assert sent[0] > 20_000
    most = 250 + len(str(tmp_path))
    assert all(after - before < most for before, after in itertools.pairwise(sent[1:]))


def test_errors_of_the_state_come_at_once_and_to_all(ranks: RankPool, tmp_path: Path) -> None:
    def broken(folder: str) -> str:
        class Broken:
            def state_dict(self) -> dict[str, Any]:
                if dist.get_rank() == 1:
                    raise KeyError("nothing here")
                return {"w": torch.ones(2)}

            def load_state_dict(self, state: Any) -> None: ...

        saver = shared_saver("process")
        saver.warm_up()
        try:
            future = saver.save({"m": Broken()}, checkpoint_id=folder)
        except KeyError:
            return "raised"
        assert isinstance(future, SaveFuture)
        return str(future.exception(timeout=PATIENCE_SECONDS))

    told = ranks.run(2, broken, str(tmp_path))
    assert told[1] == "raised"
    assert "nothing here" in told[0]
    assert "rank 1" in told[0]


def test_unpicklable_writers_are_refused_clearly(savers: dict[str, AsyncSaver], tmp_path: Path) -> None:
    writer = OneFile(str(tmp_path))
    writer.callback = lambda: None
    error = savers["process"].save({"w": torch.ones(3)}, storage_writer=writer).exception()  # type: ignore[union-attr]
    assert isinstance(error, WorkerError)
    assert "storage writer" in str(error)
    assert "thread saver" in str(error)


@pytest.mark.device
def test_a_process_reads_pinned_memory(device: str, tmp_path: Path) -> None:
    state = {"large": torch.ones(1 << 22, device=device), "half": torch.ones(1000, device=device, dtype=torch.half)}
    with AsyncSaver("process") as saver:
        for step in range(1, 4):
            torch.get_device_module(device)._sleep(10_000_000)
            for value in state.values():
                value.fill_(step)
            future = saver.save(state, checkpoint_id=tmp_path)
            for value in state.values():
                value.zero_()
            future.result()  # type: ignore[union-attr]
            found = {name: torch.zeros_like(value, device="cpu") for name, value in state.items()}
            load(found, checkpoint_id=tmp_path)
            assert all(bool((value == step).all()) for value in found.values())
