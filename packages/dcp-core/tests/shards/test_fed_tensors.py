"""Tensors whose bytes come from a feed: planned like others, asked for once, and never read from memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dcp_core import DefaultSavePlanner, SavePlanner, load
from dcp_core.errors import UnsupportedValueError
from dcp_core.testing.memory import MemoryReader, MemoryWriter
from dcp_core.testing.memory_store import OBJECTS
from dcp_core.toolkit import contiguous, save_with, tensor_bytes
from dcp_io.requests import PiecewiseData
from dcp_ranks import make_coordinator

REAL = {"fed": torch.arange(60.0).reshape(6, 10), "other": torch.arange(24, dtype=torch.int16).reshape(4, 6).t()}


class Pieces:
    """The bytes of a tensor, for one pass."""

    def __init__(self, data: bytes) -> None:
        self.nbytes, self._data = len(data), data

    def pieces(self, max_bytes: int) -> Iterator[bytes]:
        for start in range(0, self.nbytes, max_bytes):
            yield self._data[start : start + max_bytes]


class Feed:
    """Feed of tensors that hold the wrong values in memory."""

    def __init__(self, described: dict[str, torch.Tensor]) -> None:
        self._real = {value.data_ptr(): REAL[name] for name, value in described.items()}
        self.expected: list[int] = []
        self.taken = self.abandoned = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._real

    def expect(self, items: int) -> None:
        self.expected.append(items)

    def take(self, tensor: torch.Tensor) -> PiecewiseData:
        self.taken += 1
        return Pieces(bytes(tensor_bytes(contiguous(self._real[tensor.data_ptr()]))))

    def abandon(self) -> None:
        self.abandoned += 1


class WholeWriter(MemoryWriter):
    """Takes tensors as a whole."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            planner.resolve_data(item)
        return super().write_data(plan, planner)


class OwnPlanner(SavePlanner):
    """Plans nothing; has no feed."""

    set_up_planner = create_local_plan = create_global_plan = finish_plan = resolve_data = None  # type: ignore[assignment]


@pytest.fixture
def described() -> Iterator[dict[str, torch.Tensor]]:
    yield {name: torch.full_like(value, -1) for name, value in REAL.items()}
    OBJECTS.clear()


def _save(state: dict[str, Any], feed: Feed, writer: MemoryWriter, planner: Any = None) -> Any:
    with make_coordinator(None, no_dist=True) as coordinator:
        return save_with(coordinator, state, storage_writer=writer, planner=planner, feed=feed)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_bytes_come_from_the_feed(described: dict[str, torch.Tensor], compression: str | None) -> None:
    feed, kept = Feed(described), torch.arange(5.0)
    _save({**described, "kept": kept}, feed, MemoryWriter("a", compression=compression))
    assert (feed.expected, feed.taken, feed.abandoned) == ([2], 2, 0)
    found = {name: torch.zeros_like(value) for name, value in {**described, "kept": kept}.items()}
    load(found, storage_reader=MemoryReader("a"), no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in {**REAL, "kept": kept}.items())


def test_a_save_without_fed_items_says_so(described: dict[str, torch.Tensor]) -> None:
    feed = Feed(described)
    _save({"kept": torch.arange(5.0)}, feed, MemoryWriter("a"))
    assert (feed.expected, feed.taken) == ([0], 0)


def test_a_writer_that_takes_whole_tensors_is_refused(described: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'fed' is larger than the memory for copies.*max_staging_bytes"):
        _save(described, Feed(described), WholeWriter("a"))
    assert not OBJECTS


def test_only_a_default_planner_plans_a_feed(described: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedValueError, match="a OwnPlanner cannot plan tensors that come from a feed"):
        _save(described, Feed(described), MemoryWriter("a"), OwnPlanner())


def test_the_planner_keeps_nothing_of_the_feed(described: dict[str, torch.Tensor]) -> None:
    planner = DefaultSavePlanner()
    _save(described, Feed(described), MemoryWriter("a"), planner)
    assert (planner.feed, planner.fed_tensors) == (None, None)
