"""Staging: structures are recognised, copies are whole, and nothing is overwritten while it is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcp_async.arena import ArenaPool
from dcp_async.copying import Copier
from dcp_async.errors import MutatedWhileStagedError
from dcp_async.mutations import MutationGuard
from dcp_async.staging import Stager
from dcp_core import UnsupportedValueError
from dcp_core.objects import DumpedObject, load_object


def _stager(**options: Any) -> Stager:
    return Stager(ArenaPool(shared=False, pinned=False), Copier(2), **options)


def test_one_structure_as_long_as_nothing_but_values_changes() -> None:
    stager, tensor = _stager(), torch.ones(5)
    first = stager.stage({"a": tensor, "n": 1, "deep": {"l": [tensor[1:3]]}})
    tensor.add_(1)
    second = stager.stage({"a": tensor, "n": 2, "deep": {"l": [tensor[1:3]]}})
    moved = tensor.clone()
    third = stager.stage({"a": moved, "n": 2, "deep": {"l": [moved[1:3]]}})
    assert first.structure is second.structure is third.structure
    assert (first.objects, second.objects) == ([1], [2])
    assert first.state_dict()["a"].tolist() == [1.0] * 5
    assert second.state_dict()["deep"]["l"][0].tolist() == [2.0] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.ones(5), "n": 1},
        {"a": torch.ones(6), "n": 1},
        {"a": torch.ones(5, dtype=torch.float64), "n": 1},
        {"n": 1, "a": torch.ones(5)},
        {"a": torch.ones(5), "n": {"m": 1}},
        {"a": torch.ones(5, requires_grad=True), "n": 1},
    ],
)
def test_another_structure_is_another_one(other: dict[str, Any]) -> None:
    stager = _stager()
    assert stager.stage({"a": torch.ones(5), "n": 1}).structure is not stager.stage(other).structure


def test_sharing_is_part_of_the_structure() -> None:
    stager, tensor = _stager(), torch.ones(5)
    tied = stager.stage({"a": tensor, "b": tensor})
    apart = stager.stage({"a": tensor, "b": tensor.clone()})
    assert tied.structure is not apart.structure
    found = tied.state_dict()
    assert found["a"].data_ptr() == found["b"].data_ptr()


def test_a_copy_that_is_read_is_not_overwritten() -> None:
    stager = _stager()
    first = stager.stage({"a": torch.ones(5)})
    second = stager.stage({"a": torch.zeros(5)})
    assert first.state_dict()["a"].sum() == 5
    stager.pool.give_back(first.arena)
    assert stager.stage({"a": torch.full((5,), 3.0)}).arena is first.arena
    assert second.state_dict()["a"].sum() == 0


def test_objects_are_what_they_were() -> None:
    thing = [1, {"deep"}, 2]
    staged = _stager().stage({"thing": thing, "n": 1.5})
    thing[1].add("late")  # type: ignore[union-attr]
    dumped, number = staged.objects
    assert isinstance(dumped, DumpedObject)
    assert load_object(dumped.data, key="thing") == [1, {"deep"}, 2]
    assert number == 1.5


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"'m\.f'"):
        _stager().stage({"m": {"f": lambda: None}})
    with pytest.raises(UnsupportedValueError, match=r"'m\.meta'"):
        _stager().stage({"m": {"meta": torch.ones(3, device="meta")}})


def test_an_error_gives_the_memory_back() -> None:
    stager = _stager(guard=_Broken())
    with pytest.raises(MutatedWhileStagedError, match="'a'"):
        stager.stage({"a": torch.ones(5)})
    stager.guard = None
    stager.stage({"a": torch.ones(5)})
    assert stager.pool.nbytes == 4096


class _Broken(MutationGuard):
    """Changes what it has sampled, as an optimizer in another thread would."""

    def sample(self, contents: Any, placement: Any) -> Any:
        found = super().sample(contents, placement)
        contents.tensors[0].add_(1)
        return found


def test_the_guard_sees_a_step_and_nothing_else() -> None:
    state = {f"p{number}": torch.randn(50) for number in range(200)}
    for _ in range(20):
        stager = _stager(guard=MutationGuard())
        stager.stage(state)
    with pytest.raises(MutatedWhileStagedError, match=r"optimizer\.step"):
        _stager(guard=_Stepping()).stage(state)


class _Stepping(MutationGuard):
    def sample(self, contents: Any, placement: Any) -> Any:
        found = super().sample(contents, placement)
        for tensor in contents.tensors:
            tensor.add_(1)
        return found
