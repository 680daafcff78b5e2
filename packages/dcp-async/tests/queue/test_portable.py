"""Keys of classes that the worker cannot import: printed, compared and distinguished as in the trainer."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import pytest
import torch

from dcp_async.queue.portable import portable
from dcp_async.staging.skeleton import fill, look_through
from dcp_core.errors import UnsupportedValueError
from dcp_core.state_dict.flatten import flatten


class Text(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class Plain:
    def __str__(self) -> str:
        return "plain"


class LocalUnpickler(pickle.Unpickler):
    """Unpickles as in the worker, which cannot import this module."""

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            raise AttributeError(f"Can't get attribute {name!r}")
        return super().find_class(module, name)


def _elsewhere(value: Any) -> Any:
    import io

    return LocalUnpickler(io.BytesIO(pickle.dumps(value))).load()


STATES: list[Any] = [
    {"w": 1, "n": {"x": 2}},
    {Text.A: 1, Number.ONE: 2, 2: 3, 2.5: 4, None: 5, (1, "x"): 6, b"b": 7},
    {"deep": [{Text.A: {Plain(): torch.ones(2)}}, torch.zeros(1)]},
    {(Text.A, 1): 1, ("x", (Number.ONE,)): 2, True: 3},
]


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_names_and_paths_are_those_of_the_trainer(state: Any) -> None:
    contents = look_through(state)
    there = _elsewhere(portable(contents.skeleton))
    made = fill(there, iter(contents.tensors), iter(contents.objects))
    ours, theirs = flatten(state), flatten(made)
    assert [*theirs.values] == [*ours.values]
    assert {name: [*map(str, path)] for name, path in theirs.paths.items()} == {
        name: [*map(str, path)] for name, path in ours.paths.items()
    }


def test_a_skeleton_of_ordinary_keys_is_the_very_same() -> None:
    skeleton = look_through(STATES[0]).skeleton
    assert portable(skeleton) is skeleton


def test_keys_of_one_name_are_not_merged() -> None:
    state: Any = {Plain(): 1, Plain(): 2}
    contents = look_through(state)
    made = fill(_elsewhere(portable(contents.skeleton)), iter(()), iter(contents.objects))
    with pytest.raises(UnsupportedValueError, match="Plain object"):
        flatten(made)


def test_a_key_that_is_text_is_still_that_text() -> None:
    (key,) = _elsewhere(portable(look_through({Text.A: 1}).skeleton))[1]
    assert (key, f"{key!s}", repr(key)) == ("a", str(Text.A), repr(Text.A))
    assert (type(key).__qualname__, type(_elsewhere(key))) == ("Text", type(key))
