"""Hosts with folders of their own: each object is read where it is, and elsewhere if the copy there is bad."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp_all as dcp
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import ApartReader, blank, hosts_of, same, whole
from integration_tests.exchange.faults import _damage

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """Folders of two hosts with the same checkpoint in several files."""
    first, second = tmp_path / "host-0", tmp_path / "host-1"
    dcp.save(whole(), storage_writer=dcp.FileSystemWriter(first, thread_count=4), no_dist=True)
    shutil.copytree(first, second)
    return [first, second]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.distcp"), key=lambda file: -file.stat().st_size)


class Warned(logging.Handler):
    """Keeps the warnings of a load."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_apart(folders: list[str], kind: str, cooperative: bool | None = None) -> dict[str, Any]:
    """Load with two ranks of each host, each from its host's folder; None is enough to read together."""
    reader = ApartReader("/a/folder/of/each/host", folders[dist.get_rank() // 2])
    template, warned = blank(kind, whole()), Warned()
    logging.getLogger("dcp_exchange").addHandler(warned)
    try:
        with hosts_of(2):
            report = dcp.load(template, storage_reader=reader, cooperative=cooperative, timeout_seconds=60)
    except dcp.DcpError as error:
        return {"error": f"{type(error).__name__}: {error}", "warned": warned.texts}
    finally:
        logging.getLogger("dcp_exchange").removeHandler(warned)
    expected = {key: value if hasattr(value, "shape") else whole()[key] for key, value in template.items()}
    return {
        "right": _right(template, kind),
        "reason": (report.cooperative, report.cooperative_reason),
        "files": sorted({name for name, _, _ in reader.reads}),
        "read": report.bytes_read,
        "warned": warned.texts,
        "keys": len(expected),
    }


def _right(template: dict[str, Any], kind: str) -> bool:
    if kind == "ddp":
        return same(template, whole())
    again = blank(kind, whole())
    dcp.load(again, checkpoint_id=Path(_whole_folder[0]), cooperative=False)
    return same(template, again)


_whole_folder: list[str] = []


def load_from(folders: list[str], kind: str, good: str, cooperative: bool | None = None) -> dict[str, Any]:
    _whole_folder[:] = [good]
    return load_apart(folders, kind, cooperative)


def run(ranks: RankPool, folders: list[Path], tmp_path: Path, kind: str = "ddp") -> list[dict[str, Any]]:
    good = tmp_path / "good"
    if not good.exists():
        dcp.save(whole(), checkpoint_id=good, no_dist=True)
    return ranks.run(4, load_from, [str(folder) for folder in folders], kind, str(good))


def check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert "error" not in one, one["error"]
        assert one["right"]


@pytest.mark.parametrize("kind", ["ddp", "columns", "pipeline"])
def test_objects_are_read_where_they_are(ranks: RankPool, folders: list[Path], tmp_path: Path, kind: str) -> None:
    apart = [[file.name for file in files(folder)] for folder in folders]
    for folder, names in zip(folders, (apart[0][::2], apart[1][1::2]), strict=True):
        for name in names:
            (folder / name).unlink()
    found = run(ranks, folders, tmp_path, kind)
    check(found)
    for rank, one in enumerate(found):
        there = {file.name for file in files(folders[rank // 2])}
        assert {*one["files"]} <= there, "a host reads what it has"
        assert one["reason"] == (True, "each host has its own files")
        assert one["warned"] == []
    total = sum(value.nbytes for value in whole().values() if hasattr(value, "nbytes"))
    assert sum(one["read"] for one in found) <= 1.01 * total


@pytest.mark.parametrize("kind", ["ddp", "pipeline"])
@pytest.mark.parametrize("host", [0, 1])
def test_a_damaged_copy_is_left_for_another_one(
    ranks: RankPool, folders: list[Path], tmp_path: Path, kind: str, host: int
) -> None:
    for file in files(folders[host]):
        _damage(file)
    found = run(ranks, folders, tmp_path, kind)
    check(found)
    assert found[0]["warned"]
    assert all(f"the copy on the host of rank {2 * host} is left" in text for text in found[0]["warned"])


def test_an_object_that_one_of_two_holders_lacks(ranks: RankPool, folders: list[Path], tmp_path: Path) -> None:
    files(folders[1])[0].unlink()
    found = run(ranks, folders, tmp_path)
    check(found)
    assert found[0]["warned"] == []


def test_an_object_that_no_host_has(ranks: RankPool, folders: list[Path], tmp_path: Path) -> None:
    name = files(folders[0])[0].name
    for folder in folders:
        (folder / name).unlink()
    found = run(ranks, folders, tmp_path)
    for one in found:
        assert "CheckpointNotFoundError" in one["error"]
        assert f"no host of this job has {name} (hosts: 2)" in one["error"]
        assert "load an earlier checkpoint" in one["error"]


def test_an_object_that_is_damaged_on_all_holders(ranks: RankPool, folders: list[Path], tmp_path: Path) -> None:
    name = files(folders[0])[0].name
    for folder in folders:
        _damage(folder / name)
    found = run(ranks, folders, tmp_path)
    for one in found:
        assert "CorruptCheckpointError" in one["error"]
        assert name in one["error"]
        assert "failed on rank" in one["error"]


def test_hosts_that_cannot_read_together_say_why(ranks: RankPool, folders: list[Path], tmp_path: Path) -> None:
    good = str(tmp_path / "good")
    dcp.save(whole(), checkpoint_id=good, no_dist=True)
    found = ranks.run(4, load_from, [str(folder) for folder in folders], "ddp", good, False)
    assert [one["reason"] for one in found] == [(False, "cooperative=False")] * 4
