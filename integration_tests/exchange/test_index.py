"""The index of a common load, which one rank reads for all: the errors are the same, and checkpoints are not mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_core.records.metadata import TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_io import engine
from dcp_manifest.file import manifest_near, manifest_write
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import CountingReader, blank, same, whole
from integration_tests.kits.coordinators import caught

STATE = {"encoder.weight": torch.ones(8), "step": 3}


def load_text(folder: str, names: list[str], cooperative: bool) -> str:
    template = {name: torch.zeros(8) for name in names}
    return str(caught(lambda: dcp.load(template, checkpoint_id=folder, cooperative=cooperative)))


@pytest.mark.parametrize("cooperative", [False, True])
def test_missing_keys_are_named_with_suggestions(ranks: RankPool, tmp_path: Path, cooperative: bool) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    for text in ranks.run(3, load_text, str(tmp_path), ["encoder.weights"], cooperative):
        assert "Missing key in checkpoint state_dict: encoder.weights" in text
        assert "did you mean 'encoder.weight'" in text


@pytest.mark.parametrize("cooperative", [False, True])
def test_no_checkpoint(ranks: RankPool, tmp_path: Path, cooperative: bool) -> None:
    for text in ranks.run(3, load_text, str(tmp_path), ["w"], cooperative):
        assert f"there is no checkpoint in {tmp_path}" in text


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_damaged_index(ranks: RankPool, tmp_path: Path, cooperative: bool) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    data = bytearray((tmp_path / ".metadata").read_bytes())
    data[-100] ^= 1
    (tmp_path / ".metadata").write_bytes(data)
    for text in ranks.run(3, load_text, str(tmp_path), ["encoder.weight"], cooperative):
        assert "CorruptCheckpointError" in text


class OwnFolder(dcp.FileSystemReader):
    """A reader that sees another folder under the same name on each rank, as on disks that are not shared."""

    def _open(self, checkpoint_id: Any) -> Any:
        return super()._open(Path(checkpoint_id) / str(dist.get_rank()))


def from_own_folder(folder: str) -> str:
    return str(caught(lambda: dcp.load(blank("ddp", whole()), storage_reader=OwnFolder(folder), cooperative=True)))


def test_disks_that_are_not_shared_are_noticed(ranks: RankPool, tmp_path: Path) -> None:
    for rank in range(3):
        dcp.save(whole(), checkpoint_id=tmp_path / str(rank), no_dist=True)
    for text in ranks.run(3, from_own_folder, str(tmp_path)):
        assert "ranks see different checkpoints under one id" in text
        assert "do not share their storage" in text


class OwnMetadata(CountingReader):
    """A reader that makes something of the metadata, which another rank cannot do for it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        self.asked = True
        return super().read_metadata(*args, **kwargs)


def by_own_metadata(folder: str, ranks_with: list[int]) -> tuple[bool, bool, bool, int]:
    reader = (OwnMetadata if dist.get_rank() in ranks_with else CountingReader)(folder)
    template = blank("ddp", whole())
    report = dcp.load(template, storage_reader=reader, cooperative=True)
    return same(template, whole()), report.cooperative, getattr(reader, "asked", False), len(reader.index_reads)


@pytest.mark.parametrize("ranks_with", [[0, 1, 2], [1]], ids=["all", "one"])
def test_a_reader_with_metadata_of_its_own_reads_the_index(
    ranks: RankPool, tmp_path: Path, ranks_with: list[int]
) -> None:
    dcp.save(whole(), checkpoint_id=tmp_path, no_dist=True)
    found = ranks.run(3, by_own_metadata, str(tmp_path), ranks_with)
    assert [one[:2] for one in found] == [(True, True)] * 3
    assert [one[2] for one in found] == [rank in ranks_with for rank in range(3)]
    assert all(one[3] for one in found), "each rank reads the index"


def rows(start: int, stop: int) -> LocalTensor:
    """Rows of zeros of a tensor of 192 rows, all of which a save wrote as one row each."""
    part = torch.zeros(stop - start, 5)
    shard = LocalShard(torch.Size((start, 0)), part.shape, lambda: part)
    return LocalTensor(torch.Size((192, 5)), TensorProperties(part.dtype), False, (shard,))


def load_rows(folder: str, cooperative: bool) -> tuple[bool, int, bool]:
    rank, reader = dist.get_rank(), dcp.FileSystemReader(folder)
    template: dict[str, Any] = {"model": rows(rank * 64 - 3 * (rank > 0), rank * 64 + 64), "rest": {"lr": 0.0}}
    with mock.patch.object(engine, "IN_PARTS_ABOVE_BYTES", 0), mock.patch.object(manifest_near, "_CHUNKS_PER_LEVEL", 0):
        dcp.load(template, storage_reader=reader, cooperative=cooperative)
    stored = reader.read_metadata().state_dict_metadata["model"]
    kept = reader._metadata.state_dict_metadata["model"]
    (shard,) = template["model"].shards
    first = shard.offsets[0]
    values = torch.arange(960.0).reshape(192, 5)[first : first + len(shard.get())]
    return torch.equal(shard.get(), values), len(stored.chunks), len(kept.chunks) <= 67


@pytest.mark.parametrize("cooperative", [False, True])
def test_each_rank_reads_a_part_of_a_large_index(
    ranks: RankPool, tmp_path: Path, cooperative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest_write, "RUNS_ABOVE_CHUNKS", 1)
    one_by_one = torch.arange(960.0).reshape(192, 5)
    shards = tuple(
        LocalShard(torch.Size((row, 0)), torch.Size((1, 5)), lambda row=row: one_by_one[row : row + 1])
        for row in range(192)
    )
    whole_tensor = LocalTensor(one_by_one.shape, TensorProperties(torch.float32), False, shards)
    dcp.save({"model": whole_tensor, "rest": {"lr": 0.5}}, checkpoint_id=tmp_path, no_dist=True)
    assert ranks.run(3, load_rows, str(tmp_path), cooperative) == [(True, 192, True)] * 3
