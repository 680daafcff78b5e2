"""Whether ranks read together: what was asked for, where the files lie, what is installed; and what is reported."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_base import imports
from dcp_core import hookimpl
from dcp_exchange.transfer import Transfer
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import CountingReader, blank, same, whole
from integration_tests.kits.coordinators import caught

LOCAL = "the checkpoint is on a local disk, from which each rank reads fast"
REMOTE = "the checkpoint is in a remote storage"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("choice") / "saved")
    dcp.save(whole(), checkpoint_id=made, no_dist=True)
    return made


def chosen(folder: str, cooperative: bool | None, options: dict[str, Any]) -> tuple[bool, str, int, bool]:
    template = blank("ddp", whole())
    report = dcp.load(template, storage_reader=CountingReader(folder, **options), cooperative=cooperative)
    assert report.bytes_read + report.bytes_received >= sum(
        value.nbytes for value in whole().values() if isinstance(value, torch.Tensor)
    )
    return report.cooperative, report.cooperative_reason, report.bytes_received, same(template, whole())


CHOICES: list[tuple[bool | None, dict[str, Any], bool, str]] = [
    (None, {"kind": "local"}, False, LOCAL),
    (None, {"kind": "remote"}, True, REMOTE),
    (True, {"kind": "local"}, True, "cooperative=True"),
    (True, {"kind": "remote"}, True, "cooperative=True"),
    (False, {"kind": "local"}, False, "cooperative=False"),
    (False, {"kind": "remote"}, False, "cooperative=False"),
    (None, {"verify": "before"}, False, "rank 0: verify='before' checks all bytes before it delivers any"),
    (True, {"verify": "before"}, False, "rank 0: verify='before' checks all bytes before it delivers any"),
    (None, {"verify": "full"}, True, REMOTE),
    (None, {"verify": False}, True, REMOTE),
]


@pytest.mark.parametrize(("cooperative", "options", "together", "reason"), CHOICES)
def test_what_was_asked_for_and_where_the_files_lie(
    ranks: RankPool, folder: str, cooperative: bool | None, options: dict[str, Any], together: bool, reason: str
) -> None:
    for one in ranks.run(2, chosen, folder, cooperative, options):
        assert one[:2] == (together, reason)
        assert (one[2] > 0, one[3]) == (together, True)


@pytest.mark.parametrize("cooperative", [None, True])
def test_one_rank_reads_alone(ranks: RankPool, folder: str, cooperative: bool | None) -> None:
    assert ranks.run(1, chosen, folder, cooperative, {}) == [(False, "there is one rank", 0, True)]


def each_its_own(folder: str) -> tuple[str, str]:
    cooperative = (None, True)[dist.get_rank() % 2]
    error = caught(lambda: dcp.load(blank("ddp", whole()), checkpoint_id=folder, cooperative=cooperative))
    return type(error).__name__, str(error)


def test_different_values_are_an_error_on_all_ranks(ranks: RankPool, folder: str) -> None:
    for name, text in ranks.run(3, each_its_own, folder):
        assert name == "ValueError"
        assert "rank 0 loads with cooperative=None, rank 1 with cooperative=True" in text
        assert "pass the same value on all ranks" in text


def with_nonsense(folder: str, cooperative: Any) -> str:
    return str(caught(lambda: dcp.load(blank("ddp", whole()), checkpoint_id=folder, cooperative=cooperative)))


@pytest.mark.parametrize("cooperative", ["yes", 0, 1])
def test_other_values_are_an_error(ranks: RankPool, folder: str, cooperative: Any) -> None:
    for text in ranks.run(2, with_nonsense, folder, cooperative):
        assert f"cooperative={cooperative!r}: pass True, False or None" in text


def some_place_differs(folder: str) -> tuple[bool, str]:
    kind = "local" if dist.get_rank() == 1 else "remote"
    found = chosen(folder, None, {"kind": kind})
    return found[0], found[1]


def test_one_local_place_is_enough_to_read_alone(ranks: RankPool, folder: str) -> None:
    assert ranks.run(3, some_place_differs, folder) == [(False, LOCAL)] * 3


def without_plugin(folder: str, cooperative: bool | None) -> Any:
    with mock.patch.object(imports, "is_installed", return_value=False):
        template = blank("ddp", whole())
        try:
            report = dcp.load(template, storage_reader=CountingReader(folder), cooperative=cooperative)
        except dcp.DcpError as error:
            return type(error).__name__, str(error)
        assert same(template, whole())
        return report.cooperative, report.cooperative_reason


def test_without_the_package(ranks: RankPool, folder: str) -> None:
    for name, text in ranks.run(2, without_plugin, folder, True):
        assert name == "CheckpointException"
        assert "cooperative" in text
        assert "dcp-exchange" in text
    alone = ranks.run(2, without_plugin, folder, None)
    assert alone == [(False, "rank 0: dcp-exchange is not installed")] * 2
    assert ranks.run(2, without_plugin, folder, False) == [(False, "cooperative=False")] * 2


class StockStyle(dcp.StorageReader):
    """A reader with nothing but the methods of stock's readers."""

    def __init__(self, path: str) -> None:
        self.inner = dcp.FileSystemReader(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        self.inner.reset(checkpoint_id)

    def read_metadata(self) -> Any:
        return self.inner.read_metadata()

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        self.inner.set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: Any) -> Any:
        return self.inner.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: Any) -> Any:
        return self.inner.prepare_global_plan(plans)

    def read_data(self, plan: Any, planner: Any) -> Any:
        return self.inner.read_data(plan, planner)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def by_stock_style(folder: str, cooperative: bool | None) -> tuple[bool, str, bool]:
    template = blank("ddp", whole())
    report = dcp.load(template, storage_reader=StockStyle(folder), cooperative=cooperative)
    return report.cooperative, report.cooperative_reason, same(template, whole())


@pytest.mark.parametrize("cooperative", [None, True])
def test_readers_as_in_stock_read_alone(ranks: RankPool, folder: str, cooperative: bool | None) -> None:
    reason = "rank 0: StockStyle reads by itself, as in stock"
    assert ranks.run(2, by_stock_style, folder, cooperative) == [(False, reason, True)] * 2


class Observer:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    @hookimpl
    def dcp_on_event(self, event: Any) -> None:
        self.events.append(event)


def observed(folder: str) -> tuple[Any, dict[str, tuple[int | None, int | None]]]:
    observer = Observer()
    dcp.plugins.register(observer, name="test-observer")
    try:
        report = dcp.load(blank("ddp", whole()), checkpoint_id=folder, cooperative=True)
    finally:
        dcp.plugins.unregister("test-observer")
    finished = [event for event in observer.events if event.state == "finished"]
    return report, {event.phase: (event.bytes, event.bytes_received) for event in finished}


def test_events_carry_bytes_read_and_received(ranks: RankPool, folder: str) -> None:
    for report, events in ranks.run(3, observed, folder):
        assert report.bytes_received > 0
        assert report.unverified == ()
        assert events["read"] == events["total"] == (report.bytes_read, report.bytes_received)


def test_progress_of_a_common_read_adds_up(ranks: RankPool, tmp_path: Path) -> None:
    saved = {"w": torch.arange(3 << 20, dtype=torch.float32)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)

    def work() -> tuple[int, int]:
        template = {"w": torch.zeros(3 << 20)}
        count = Transfer._count_received

        def count_late(transfer: Transfer, piece: int) -> None:
            time.sleep(0.1)
            count(transfer, piece)

        with mock.patch.object(Transfer, "_count_received", count_late):
            report = dcp.load(template, checkpoint_id=tmp_path, cooperative=True)
        assert torch.equal(template["w"], saved_again())
        return report.bytes_read, report.bytes_received

    def saved_again() -> torch.Tensor:
        return torch.arange(3 << 20, dtype=torch.float32)

    for read, received in ranks.run(2, work):
        assert read + received == 12 << 20
