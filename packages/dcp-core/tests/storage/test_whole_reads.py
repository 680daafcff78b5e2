"""Whole tensors are requested from columns only where that makes no difference but speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_core import DefaultLoadPlanner, load, save
from dcp_core.records.metadata import MetadataIndex
from dcp_core.records.protocols import ReadItem
from dcp_core.storage.storage_reader import split_whole_reads
from integration_tests.kits.memory import MemoryReader, MemoryWriter


def state(value: float) -> dict[str, Any]:
    return {
        "plain": torch.full((3, 4), value),
        "half": torch.full((5,), value, dtype=torch.bfloat16),
        "scalar": torch.tensor(value),
        "parameter": torch.nn.Parameter(torch.full((2,), value)),
        "complex": torch.full((2,), value, dtype=torch.complex128),
        "transposed": torch.full((3, 4), value).t(),
        "empty": torch.empty(0),
        "object": "text",
    }


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> str:
    name = f"whole reads {request.node.name}"
    save(state(1.0), storage_writer=MemoryWriter(name))
    return name


def split(planner: DefaultLoadPlanner, folder: str, *, look: bool = False) -> tuple[set[str], set[str]]:
    """Keys that are requested from columns, and the others."""
    metadata = MemoryReader(folder).read_metadata()
    planner.set_up_planner(state(0.0), metadata, True)
    plan = planner.create_local_plan()
    if look:
        assert metadata.storage_data is not None
        assert metadata.storage_data[MetadataIndex("plain", (0, 0))]
    requests, others = split_whole_reads(plan, planner, metadata)
    return {request.key for request in requests}, {item.dest_index.fqn for item in others}


def test_ordinary_tensors_come_from_columns(folder: str) -> None:
    others = {"transposed", "object"}
    assert split(DefaultLoadPlanner(), folder) == (state(0.0).keys() - others, others)
    template = state(0.0)
    load(template, storage_reader=MemoryReader(folder))
    for key, value in state(1.0).items():
        assert template[key] == value if key == "object" else torch.equal(template[key], value)


class Committing(DefaultLoadPlanner):
    def __init__(self) -> None:
        super().__init__()
        self.committed: set[str] = set()

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.add(read_item.dest_index.fqn)


class Doubling(DefaultLoadPlanner):
    """Reads into a tensor of its own."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).detach().copy_(2 * tensor)


def test_a_planner_that_decides_is_asked(folder: str) -> None:
    assert split(Committing(), folder)[0] == set()
    planner = Committing()
    load(state(0.0), storage_reader=MemoryReader(folder), planner=planner)
    assert planner.committed == state(0.0).keys() - {"object", "empty"} | (planner.committed & {"empty"})
    template = state(0.0)
    load(template, storage_reader=MemoryReader(folder), planner=Doubling())
    assert torch.equal(template["plain"], state(2.0)["plain"])
    replaced = DefaultLoadPlanner()
    replaced.commit_tensor = lambda *_: None  # type: ignore[method-assign]
    assert split(replaced, folder)[0] == set()


def test_places_that_somebody_has_looked_at_are_taken_from_there(folder: str) -> None:
    assert split(DefaultLoadPlanner(), folder, look=True)[0] == set()
