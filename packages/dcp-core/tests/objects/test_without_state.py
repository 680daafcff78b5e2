"""Objects whose state belongs into a checkpoint, or that have none: refused when they are saved as values."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from dcp_core import PerRank, load, save
from dcp_core.errors import UnsupportedValueError
from integration_tests.kits.memory import MemoryReader, MemoryWriter


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW(torch.nn.Linear(1, 1).parameters())


WITHOUT: dict[str, Any] = {
    "data loader": lambda: DataLoader(Numbers()),
    "with what no pickle has": lambda: DataLoader(Numbers(), collate_fn=lambda batch: batch),
    "data set": Numbers,
    "stream": Stream,
    "tensors": lambda: TensorDataset(torch.ones(2)),
    "sampler": lambda: RandomSampler(range(3)),
}
NESTED: dict[str, Any] = {
    "module": lambda: torch.nn.Linear(1, 1),
    "optimizer": optimizer,
    "scheduler": lambda: torch.optim.lr_scheduler.StepLR(optimizer(), 1),
    "object": Stateful,
}


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.parametrize(
    "place", [lambda value: value, lambda value: {"train": value}, lambda value: (value, 1), PerRank]
)
def test_data_loaders_and_data_sets_are_refused(kind: str, place: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'loader.*no state to save.*ResumableSampler.*StatefulDataLoader"):
        save({"loader": place(WITHOUT[kind]())}, storage_writer=MemoryWriter("without state"))


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.parametrize(
    "place",
    [
        lambda value: {"a": value},
        lambda value: [value, value],
        lambda value: [{"a": value}],
        lambda value: (value, "b"),
        lambda value: {"a": {"b": [1, (2, value)]}},
    ],
)
def test_stateful_objects_below_the_top_level_are_refused(kind: str, place: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"'all.*move it to the top level.*or save its state_dict\(\)"):
        save({"all": place(NESTED[kind]())}, storage_writer=MemoryWriter("without state"))


@dataclasses.dataclass
class Settings:
    lr: float = 0.1


@pytest.mark.filterwarnings("ignore::dcp_core.objects.object_bytes.UnloadableObjectWarning")
@pytest.mark.parametrize(
    "value",
    [
        [*range(5000)], (1, [2]), {3}, torch.Size((1,)), Settings(), torch.nn.Linear, collections.Counter("ab"),
        collections.deque([1]), {"deep": [[[[]]]]}, range(3), torch.float32, slice(1), b"bytes", 1j,
    ],
    ids=repr,
)  # fmt: skip
def test_other_objects_are_saved(value: Any) -> None:
    save({"value": {"deep": value}}, storage_writer=MemoryWriter("without state"))


@pytest.mark.parametrize("value", [Stateful, Numbers])
def test_a_caller_can_insist(value: Any) -> None:
    with torch.serialization.safe_globals([value]):
        save({"all": [value()]}, storage_writer=MemoryWriter("without state"))
        state: dict[str, Any] = {"all": None}
        load(state, storage_reader=MemoryReader("without state"))
    assert type(state["all"][0]) is value
