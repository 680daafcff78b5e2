"""Values are told apart by type and by bits, whichever of their parts are one object, and by nothing else."""

from __future__ import annotations

import copy
import struct
from array import array
from collections import OrderedDict, namedtuple
from datetime import date, datetime, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from dcp_core.planning.replicas import same_value, value_bytes, value_digest


def word(text: str) -> str:
    """A string that is no other object."""
    return "".join(list(text))


@pytest.mark.parametrize(
    "wrap", [tuple, lambda pair: OrderedDict(zip("ab", pair, strict=True))], ids=["plain", "other"]
)
@pytest.mark.parametrize("value", [lambda: word("abc"), lambda: 1.5 * len("ab"), lambda: (word("x"), 2.0)])
def test_one_object_twice_is_two_equal_ones(wrap: Any, value: Any) -> None:
    one = value()
    assert value_bytes(wrap([one, one])) == value_bytes(wrap([value(), value()]))


@pytest.mark.parametrize(
    "make",
    [
        lambda element: (torch.full((3,), element), "beside"),
        lambda element: {"t": [torch.full((2, 4), element).T]},
        lambda element: OrderedDict(a=np.full(3, element)),
        lambda element: (date(2026, 1, int(element)), {1, 2}),
    ],
    ids=["tensor", "strided", "array", "date"],
)
def test_elements_tell_values_apart(make: Any) -> None:
    assert value_bytes(make(1.0)) == value_bytes(make(1.0))
    assert value_bytes(make(1.0)) != value_bytes(make(2.0))


def test_dtype_and_shape_tell_tensors_apart() -> None:
    made = [torch.zeros(4), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2), torch.nn.Parameter(torch.zeros(4))]
    assert len({value_bytes((tensor,)) for tensor in made}) == len(made)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = [OrderedDict()]
    value.append(value)
    with pytest.raises(ValueError, match="cyclic"):
        value_bytes(value)


def nan(bits: int) -> float:
    """A float of these bits."""
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


class One(IntEnum):
    ONE = 1


class Colour(Enum):
    RED = 1


class Word(str):
    """Equal to the plain string."""

    __slots__ = ()


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 - as others write them

# Values of which each is another one, though many are equal, or have the same bytes or the same text.
LOOK_ALIKES: list[Any] = [
    0, 0.0, -0.0, False, None, "", b"", (), [], {}, set(), frozenset(), 0j, complex(-0.0, 0.0), complex(0.0, -0.0),
    complex(-0.0, -0.0), 1, 1.0, True, "1", b"1", bytearray(b"1"), One.ONE, Colour.RED, Decimal(1), Decimal("1.0"),
    2**64, float(2**64), "a", b"a", Word("a"), nan(0x7FF8000000000000), nan(0x7FF8000000000001),
    nan(0xFFF8000000000000),
    array("b", b"1"), array("B", b"1"), memoryview, len, date(2026, 1, 1), datetime(2026, 1, 1),  # noqa: DTZ001
    datetime(2026, 1, 1, tzinfo=timezone.utc), PurePosixPath("a"), (1, 2), [1, 2], Pair(1, 2), {1: 2}, {True: 2},
    {1: 2.0}, {1, 2}, frozenset({1, 2}), {1.0, 2}, OrderedDict({1: 2}), {"a": 1, "b": 2}, {"b": 2, "a": 1},
    np.int64(1), np.float64(5e-324), np.int32(1), np.uint64(1), np.float64(0.0), np.float64(-0.0), np.bool_(True),
    np.array([1]), np.array([1], np.uint64), np.array([5e-324]), np.array([[1]]), np.array(1), np.array([1], object),
    np.array(["a"]), np.array([b"a"]), np.array([0.0]), np.array([-0.0]), np.array([nan(0x7FF8000000000001)]),
    torch.tensor(1), torch.tensor([1]), torch.tensor([1.0]), torch.tensor(True), torch.tensor([0.0]),
    torch.tensor([-0.0]), torch.tensor([0j]), torch.tensor([0j]).conj().resolve_conj(), torch.tensor([1 + 0j]).conj(),
    torch.zeros(1, dtype=torch.float8_e4m3fn), torch.zeros(1, dtype=torch.uint8), torch.nn.Parameter(torch.zeros(1)),
    torch.empty(0), torch.empty(0, 1), torch.float32, torch.Size([1, 2]),
]  # fmt: skip


def test_no_two_values_that_look_alike_are_the_same() -> None:
    for wrap in (lambda value: value, lambda value: (value,), lambda value: {"x": [value]}):
        for at, one in enumerate(LOOK_ALIKES):
            for other_at, other in enumerate(LOOK_ALIKES):
                assert same_value(wrap(one), wrap(other)) == (at == other_at), (one, other)


@pytest.mark.parametrize("value", LOOK_ALIKES, ids=repr)
def test_a_value_is_the_same_as_its_copy(value: Any) -> None:
    copied = copy.deepcopy(value)
    assert same_value(value, copied)
    assert value_bytes(value) == value_bytes(copied)
    assert value_digest([value]) == value_digest([copied]) != b""


def test_memory_order_and_the_order_of_sets_are_no_part_of_a_value() -> None:
    array_of_values, tensor = np.arange(6.0).reshape(2, 3), torch.arange(6.0).reshape(2, 3)
    frozen = array_of_values.copy()
    frozen.flags.writeable = False
    assert same_value([array_of_values, tensor], [np.asfortranarray(frozen), tensor.t().contiguous().t()])
    ascending, descending = set(map(str, range(50))), set(map(str, reversed(range(50))))
    assert list(ascending) != list(descending)
    assert same_value((ascending, [frozenset({"x"})]), (descending, [frozenset({"x"})]))


def test_what_cannot_be_pickled_is_the_same_only_as_itself() -> None:
    one, other = [lambda: 1], [lambda: 1]
    assert same_value(one, one)
    assert not same_value(one, other)
    assert value_digest(one) == b""
