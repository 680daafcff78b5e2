"""Staging: structures are recognised, copies are complete, and no copy is overwritten while it is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dcp_async.errors import StagingMismatchError
from dcp_async.staging import checks
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.checks import MutationGuard
from dcp_async.staging.copy_state import Copier, Stager
from dcp_async.staging.skeleton import leaves_of, look_through
from dcp_core import UnsupportedValueError
from dcp_core.objects.object_bytes import DumpedObject, load_object
from dcp_core.state_dict.flatten import flatten


class Word(str):
    """A string that is equal to the plain string, but printed differently."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"<{self!r}>"


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


@pytest.mark.parametrize(
    "keys", [(0.0, -0.0), (1, 1.0), (1, True), ((1,), (True,)), (1, np.int64(1)), ("a", Word("a"))]
)
def test_keys_that_are_equal_but_have_other_names_or_paths_are_others(keys: tuple[Any, Any]) -> None:
    stager = _stager()
    found = [stager.stage({key: torch.ones(2)}).state_dict() for key in keys]
    assert [flatten(each).paths for each in found] == [flatten({key: None}).paths for key in keys]


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


COMPLEX = torch.view_as_complex(torch.arange(1, 49.0).reshape(4, 6, 2))
VIEWS: dict[str, torch.Tensor] = {
    "imaginary part of the conjugate": COMPLEX.conj().imag,
    "strided": COMPLEX[::2].conj(),
    "columns": COMPLEX[:, 1:3].conj(),
    "transposed": COMPLEX.t().conj(),
    "expanded": COMPLEX[0].expand(3, 6).conj(),
    "negated": COMPLEX.conj().imag[1:, ::2],
    "negated and transposed": COMPLEX.conj().imag.t(),
    "a parameter": torch.nn.Parameter(COMPLEX[::2].conj()),
    "scalar": COMPLEX[1, 1].conj(),
    "empty": COMPLEX[:, :0].conj(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_conjugated_and_negated_views_are_described_as_they_are_copied(name: str) -> None:
    """A view is resolved into new memory with other strides; the description must be that of the new memory."""
    view = VIEWS[name]
    wanted = view.detach().clone().resolve_conj().resolve_neg()
    contents = look_through({"x": view})
    assert [(each.shape, each.stride()) for each in contents.tensors] == [
        leaf[1:] for leaf in leaves_of(contents.skeleton)
    ]
    for state in ({"x": view}, {"x": view, "beside": COMPLEX, "part": COMPLEX[1:3, 2:]}):
        found = _stager().stage(state).state_dict()["x"]
        assert torch.equal(found, wanted)
        assert torch.equal(_stager().stage_as_it_is(dict(state))[0]["x"], wanted)


def test_another_default_device_is_none_of_the_copys_business() -> None:
    with torch.device("meta"):
        staged = _stager().stage({"a": COMPLEX, "b": COMPLEX.real[:, ::2]})
        found = staged.state_dict()
    assert torch.equal(found["a"], COMPLEX)
    assert torch.equal(found["b"], COMPLEX.real[:, ::2])


@pytest.mark.parametrize("how", ["stage", "stage_as_it_is"])
def test_memory_that_was_freed_between_two_saves_is_named_not_read(how: str) -> None:
    """FSDP frees memory of parameters like this, and offloading that of `param.data`."""
    stager, parameter = _stager(), torch.nn.Parameter(torch.arange(4096.0))
    stage = getattr(stager, how)
    stage({"m": {"w": parameter}})
    parameter.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"'m\.w'.*its storage holds 0.*gather"):
        stage({"m": {"w": parameter}})
    parameter.data = torch.ones(5, 3).t()
    found = stage({"m": {"w": parameter}})
    copied = found.state_dict() if how == "stage" else found[0]
    assert torch.equal(copied["m"]["w"], torch.ones(3, 5))


def _swap(parameter: torch.nn.Parameter, other: torch.Tensor) -> None:
    parameter.data = other


MEANWHILE = {
    "other memory": lambda parameter: _swap(parameter, torch.zeros(4, 6)),
    "other strides": lambda parameter: _swap(parameter, parameter.data.view(6, 4).t()),
    "other sizes": lambda parameter: _swap(parameter, parameter.data[:2]),
    "another dtype": lambda parameter: _swap(parameter, parameter.data.view(torch.int32)),
    "freed": lambda parameter: parameter.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_tensor_that_gets_other_memory_while_it_is_copied_is_named(what: str) -> None:
    parameter = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6), requires_grad=False)

    class Copying(Copier):
        """Copies, and then lets another thread run."""

        def copy(self, *args: Any) -> None:
            super().copy(*args)
            MEANWHILE[what](parameter)

    stager = Stager(ArenaPool(shared=False, pinned=False), Copying(1))
    with pytest.raises(StagingMismatchError, match=r"'m\.w' is described as float32 \(4, 6\) with strides \(6, 1\)"):
        stager.stage({"step": 1, "m": {"v": torch.ones(3), "w": parameter}})


@pytest.mark.parametrize("leaf", ["dtype", "shape", "strides", "missing"])
def test_a_description_of_another_tensor_than_the_copied_one_is_found(
    monkeypatch: pytest.MonkeyPatch, leaf: str
) -> None:
    """A mistake of the stager itself, which once recorded the strides of a view, but copied the resolved tensor."""

    def described(skeleton: Any) -> Any:
        for dtype, shape, strides in leaves_of(skeleton):
            if leaf == "dtype":
                yield torch.int32, shape, strides
            elif leaf == "shape":
                yield dtype, torch.Size((*shape[:-1], 1)), strides
            elif leaf == "strides":
                yield dtype, shape, strides[::-1]

    monkeypatch.setattr(checks, "leaves_of", described)
    stager = _stager()
    with pytest.raises(StagingMismatchError, match="nothing was saved"):
        stager.stage({"w": torch.ones(4, 6)})
    monkeypatch.undo()
    stager.stage({"w": torch.ones(4, 6)})
    assert stager.pool.nbytes == 4096


def test_an_error_gives_the_memory_back() -> None:
    stager = _stager(guard=_Broken())
    with pytest.raises(StagingMismatchError, match="'a'"):
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
    with pytest.raises(StagingMismatchError, match=r"optimizer\.step"):
        _stager(guard=_Stepping()).stage(state)


class _Stepping(MutationGuard):
    def sample(self, contents: Any, placement: Any) -> Any:
        found = super().sample(contents, placement)
        for tensor in contents.tensors:
            tensor.add_(1)
        return found
