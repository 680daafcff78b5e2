"""Samples of a job that is stopped in the middle of an epoch and resumed on other real ranks, by `save` and `load`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool

LENGTH = 101
LENGTHS = [13, 0, 40, 8, 40]
GLOBAL_BATCH_SIZE = 12
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Processes of this module alone: data workers are forked from them, with whatever other tests left there."""
    with RankPool(timeout_seconds=240) as pool:
        yield pool


def read(shard: int) -> Iterator[int]:
    yield from range(sum(LENGTHS[:shard]), sum(LENGTHS[: shard + 1]))


def position(kind: str) -> Any:
    """Of the default process group's ranks."""
    if kind == "map":
        return dcp.ResumableSampler(LENGTH, GLOBAL_BATCH_SIZE, seed=3)
    return dcp.ResumableStream(read, GLOBAL_BATCH_SIZE, lengths=LENGTHS, shuffle_buffer=4, seed=3)


def samples_of_steps(
    kind: str, load: Path | None, save: Path | None, until: int | None, asynchronously: bool = False
) -> list[list[int]]:
    """Go on from a checkpoint; save after `until` samples of the epoch. The samples of each step, of all ranks."""
    data = position(kind)
    loader = data.loader(range(LENGTH), num_workers=1) if kind == "map" else data.loader(num_workers=1)
    if load is not None:
        dcp.load({"data": data}, checkpoint_id=load)
    steps = []
    for batch in loader:
        parts: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(parts, batch.tolist() if loader.weight else [])
        steps.append([sample for part in parts for sample in part])
        if data.samples_in_epoch == until:
            if asynchronously:
                future: Any = dcp.async_save({"data": data}, checkpoint_id=save)
                next(iter(loader), None)  # what follows is not in the save
                future.result()
            else:
                dcp.save({"data": data}, checkpoint_id=save)
            break
    return steps


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("jobs", [(2, 3, 1), (3, 4, 2)], ids=str)
def test_jobs_on_other_ranks_go_on_with_the_same_global_batches(
    ranks: Any, tmp_path: Path, kind: str, jobs: tuple[int, int, int]
) -> None:
    whole = ranks.run(1, samples_of_steps, kind, None, None, None)[0]
    assert sorted(sum(whole, [])) == [*range(LENGTH)]  # noqa: RUF017 - few
    found: list[list[int]] = []
    load = None
    for count, until in zip(jobs, (36, 60, None), strict=True):
        save = tmp_path / f"after-{until}"
        (steps, *others) = ranks.run(count, samples_of_steps, kind, load, save, until)
        assert all(other == steps for other in others)
        found += steps
        load = save
    assert found == whole


def test_a_background_save_has_the_position_of_its_call(ranks: Any, tmp_path: Path) -> None:
    whole = ranks.run(1, samples_of_steps, "map", None, None, None)[0]
    first = ranks.run(2, samples_of_steps, "map", None, tmp_path / "save", 48, True)[0]
    rest = ranks.run(3, samples_of_steps, "map", tmp_path / "save", None, None)[0]
    assert first + rest == whole


def refused_on(folder: Path) -> str:
    data = dcp.ResumableSampler(LENGTH + 1, GLOBAL_BATCH_SIZE)
    try:
        dcp.load({"data": data}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error)
    return ""


def test_a_position_in_other_data_is_refused_on_every_rank(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, samples_of_steps, "map", None, tmp_path / "save", 24)
    messages = ranks.run(3, refused_on, tmp_path / "save")
    assert all("dataset_length was 101 and is 102" in message for message in messages), messages


def test_the_state_is_saved_once(tmp_path: Path) -> None:
    data = dcp.ResumableSampler(LENGTH, GLOBAL_BATCH_SIZE, rank=0, world_size=1)
    dcp.save({"data": data}, checkpoint_id=tmp_path / "save")
    stored = dcp.load_keys(["data"], checkpoint_id=tmp_path / "save")["data"]
    assert stored == data.state_dict()


class OfARank:
    """A data loader whose position belongs to one rank, as torchdata's."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"rank": torch.tensor(-1)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def saved_and_loaded(folder: Path, save: bool) -> int | str:
    loader = OfARank()
    if save:
        loader.state["rank"] = torch.tensor(dist.get_rank())
        dcp.save({"loader": dcp.PerRank(loader)}, checkpoint_id=folder)
        return dist.get_rank()
    try:
        dcp.load({"loader": dcp.PerRank(loader, otherwise="error")}, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error)
    return int(loader.state["rank"])


def test_the_state_of_each_ranks_own_loader_is_for_as_many_ranks(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(3, saved_and_loaded, tmp_path / "save", True) == [0, 1, 2]
    assert ranks.run(3, saved_and_loaded, tmp_path / "save", False) == [0, 1, 2]
    for count in (2, 4):
        messages = ranks.run(count, saved_and_loaded, tmp_path / "save", False)
        expected = f"'loader' has a value per rank, saved by 3 ranks, and this job has {count}"
        assert all(expected in str(message) for message in messages), messages
