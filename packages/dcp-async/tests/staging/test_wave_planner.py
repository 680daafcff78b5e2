"""Tensors that come in pieces: planned like others, asked for once, and never read from memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from dcp_async.staging.waves import WaveFeed, WavePlanner
from dcp_core import DefaultSavePlanner, load, save
from dcp_core.errors import UnsupportedValueError
from dcp_core.tensors.tensor_memory import contiguous, tensor_bytes
from dcp_io.requests import PiecewiseData
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.memory_store import OBJECTS

REAL = {"fed": torch.arange(60.0).reshape(6, 10), "other": torch.arange(24, dtype=torch.int16).reshape(4, 6).t()}


class Pieces:
    """The bytes of a tensor, for one pass."""

    def __init__(self, data: bytes) -> None:
        self.nbytes, self._data = len(data), data

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, max_bytes):
            yield memoryview(self._data)[start : start + max_bytes]


class Feed:
    """Feed of tensors that hold the wrong values in memory."""

    def __init__(self, described: dict[str, torch.Tensor]) -> None:
        self._real = {value.data_ptr(): REAL[name] for name, value in described.items()}
        self.expected: list[int] = []
        self.taken = 0

    def holds(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.data_ptr() in self._real

    def expect(self, items: int) -> None:
        self.expected.append(items)

    def take(self, tensor: torch.Tensor) -> PiecewiseData:
        self.taken += 1
        return Pieces(bytes(tensor_bytes(contiguous(self._real[tensor.data_ptr()]))))


class WholeWriter(MemoryWriter):
    """Takes tensors as a whole."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        for item in plan.items:
            planner.resolve_data(item)
        return super().write_data(plan, planner)


@pytest.fixture
def described() -> Iterator[dict[str, torch.Tensor]]:
    yield {name: torch.full_like(value, -1) for name, value in REAL.items()}
    OBJECTS.clear()


def _save(state: dict[str, Any], feed: Feed, writer: MemoryWriter, planner: DefaultSavePlanner | None = None) -> None:
    made = WavePlanner.of(planner, cast("WaveFeed", feed))
    save(state, storage_writer=writer, planner=made, no_dist=True)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_bytes_come_from_the_feed(described: dict[str, torch.Tensor], compression: str | None) -> None:
    feed, kept = Feed(described), torch.arange(5.0)
    _save({**described, "kept": kept, "object": {1, 2}}, feed, MemoryWriter("a", compression=compression))
    assert (feed.expected, feed.taken) == ([2], 2)
    found: dict[str, Any] = {name: torch.zeros_like(value) for name, value in {**described, "kept": kept}.items()}
    found["object"] = set()
    load(found, storage_reader=MemoryReader("a"), no_dist=True)
    assert found.pop("object") == {1, 2}
    assert all(torch.equal(found[name], value) for name, value in {**REAL, "kept": kept}.items())


def test_tied_tensors_come_once(described: dict[str, torch.Tensor]) -> None:
    feed = Feed(described)
    _save({"a": described["fed"], "b": described["fed"]}, feed, MemoryWriter("a"))
    assert (feed.expected, feed.taken) == ([1], 1)


def test_a_save_without_such_items_says_so(described: dict[str, torch.Tensor]) -> None:
    feed = Feed(described)
    _save({"kept": torch.arange(5.0)}, feed, MemoryWriter("a"))
    assert (feed.expected, feed.taken) == ([0], 0)


def test_a_writer_that_takes_whole_tensors_is_refused(described: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'fed' is larger than the memory for copies.*max_staging_bytes"):
        _save(described, Feed(described), WholeWriter("a"))
    assert not OBJECTS


def test_it_has_the_options_of_the_callers_planner_and_leaves_that_as_it_is(described: dict[str, torch.Tensor]) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, replicas="raise")
    before = dict(vars(planner))
    _save(described, Feed(described), MemoryWriter("a"), planner)
    made = WavePlanner.of(planner, cast("WaveFeed", Feed(described)))
    assert (made.flatten_state_dict, made.replicas) == (False, "raise")
    assert vars(planner) == before
