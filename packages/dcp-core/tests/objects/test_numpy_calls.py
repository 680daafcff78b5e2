"""numpy's functions with arguments that would make pointers of bytes, or read beyond them: refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from dcp_core.errors import CorruptCheckpointError
from dcp_core.objects.object_bytes import load_object
from integration_tests.kits.crafted_objects import Call, archived

RECONSTRUCT: Any = np.arange(3).__reduce__()[0]
SCALAR: Any = np.float32(1).__reduce__()[0]
FROM_BUFFER: Any = np.arange(3).__reduce_ex__(5)[0]
OBJECT, FLOAT = np.dtype("O"), np.dtype("f8")
POINTERS = (3, "|", None, ("a",), {"a": (OBJECT, 0)}, 8, 1, 0)


def array(shape: Any, dtype: Any, data: Any, fortran: Any = False) -> Call:
    return Call(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, shape, dtype, fortran, data))


def dtype_of(spec: str, state: Any) -> Call:
    return Call(np.dtype, spec, False, True, state=state)


def nested(levels: int) -> Any:
    inner: Any = FLOAT
    for _ in range(levels):
        inner = dtype_of("V8", (3, "|", None, ("a",), {"a": (inner, 0)}, 8, 1, 0))
    return inner


def doubled(levels: int) -> Any:
    """Two fields over each other, each two fields over each other, …"""
    inner: Any = FLOAT
    for _ in range(levels):
        inner = dtype_of("V8", (3, "|", None, ("a", "b"), {"a": (inner, 0), "b": (inner, 0)}, 8, 1, 0))
    return inner


REFUSED: dict[str, Any] = {
    "ndarray of pointers": Call(np.ndarray, (4,), OBJECT, b"A" * 32),
    "ndarray over an array of objects": Call(np.ndarray, (3,), np.dtype("i8"), np.array([dict, list, set], object)),
    "ndarray of what was in memory": Call(np.ndarray, (9,), FLOAT),
    "pointers in raw bytes": array((1,), dtype_of("V8", POINTERS), b"A" * 8),
    "objects from bytes": array((1,), OBJECT, b"A" * 8),
    "objects from a text": array((1,), OBJECT, "A"),
    "too few bytes": array((9,), FLOAT, b"A" * 8),
    "too many bytes": array((1,), FLOAT, b"A" * 9),
    "negative shape": array((-1, -1), FLOAT, b"A" * 8),
    "shape that overflows": array((0, 1 << 62, 1 << 62), FLOAT, b""),
    "shape of too many dimensions": array((1,) * 65, FLOAT, b"A" * 8),
    "many elements of no bytes": array((1 << 40,), np.dtype("V0"), b""),
    "no dtype": array((1,), "f8", b"A" * 8),
    "order that is none": array((1,), FLOAT, b"A" * 8, "x"),
    "another class": Call(RECONSTRUCT, list, (0,), b"b"),
    "another size": Call(RECONSTRUCT, np.ndarray, (1 << 40,), b"b"),
    "scalar of pointers": Call(SCALAR, OBJECT, b"A" * 8),
    "scalar of pointers in a record": Call(SCALAR, dtype_of("V8", POINTERS), b"A" * 8),
    "scalar of too few bytes": Call(SCALAR, FLOAT, b"A" * 7),
    "buffer of pointers": Call(FROM_BUFFER, b"A" * 8, OBJECT, (1,), "C"),
    "buffer that is an array": Call(FROM_BUFFER, np.array([dict], object), FLOAT, (1,), "C"),
    "buffer of another length": Call(FROM_BUFFER, b"A" * 16, FLOAT, (1,), "C"),
    "subarray of objects": dtype_of("V8", (3, "|", (OBJECT, (1,)), None, None, 8, 1, 0)),
    "huge subarray": dtype_of("V8", (3, "|", (FLOAT, (1 << 30, 1 << 30)), None, None, 8, 1, 0)),
    "fields beyond the item": dtype_of("V4", (3, "|", None, ("a",), {"a": (FLOAT, 0)}, 4, 1, 0)),
    "fields before the item": dtype_of("V8", (3, "|", None, ("a",), {"a": (FLOAT, -8)}, 8, 1, 0)),
    "fields whose end overflows": array(
        (2,), dtype_of("V20", (3, "|", None, ("a",), {"a": (np.dtype("i4"), (1 << 31) - 1)}, 20, 1, 0)), b"A" * 40
    ),
    "fields whose offset overflows": dtype_of("V8", (3, "|", None, ("a",), {"a": (FLOAT, (1 << 32) - 8)}, 8, 1, 0)),
    "subarray that overflows": dtype_of("V8", (3, "|", (FLOAT, (1 << 29,)), None, None, 8, 1, 0)),
    "deep fields": nested(40),
    "fields without end": doubled(30),
    "dtype of a text with fields": Call(np.dtype, "f8,O"),
    "dtype of a text with a shape": Call(np.dtype, "(1000,1000)f8"),
    "dtype of strings in an arena": Call(np.dtype, "T"),
    "dtype of a list": Call(np.dtype, [("a", "O")]),
    "dtype of a class": Call(np.dtype, dict),
    "number of a range": Call(np.float64, Call(range, 1 << 40)),
    "bytes of a number": Call(np.bytes_, 1 << 40),
}  # fmt: skip


def load(value: object, protocol: int = 2) -> Any:
    return load_object(archived(value, protocol=protocol), key="k")


def test_the_arguments_that_others_are_changes_of_are_allowed() -> None:
    assert load(array((1,), FLOAT, bytes(8))).tolist() == [0.0]
    assert load(array((2,), OBJECT, [1, "a"])).tolist() == [1, "a"]
    assert load(nested(10)).itemsize == 8
    assert load(Call(FROM_BUFFER, bytes(8), FLOAT, (1,), "C")).tolist() == [0.0]
    assert load(Call(np.int64, 5)) == 5


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    for protocol in (2, 4):
        with pytest.raises(CorruptCheckpointError, match="cannot be read"):
            load([{"deep": (REFUSED[name],)}], protocol)


def test_a_state_is_given_once() -> None:
    """numpy frees the memory that an array had, whoever looks at it."""
    pickled = pickle.dumps(np.arange(3), 2)
    again = pickled[:-1] + pickled[pickled.rindex(b"(K\x01") : -1] + b"."
    assert pickled[-2:] == b"b."
    with pytest.raises(CorruptCheckpointError, match="a state for a numpy array that has one"):
        load(again)


def test_a_dtype_that_is_in_use_does_not_change() -> None:
    big = np.dtype(">i4")
    found = load([big, (big, big), np.zeros(2, big)])
    assert found[0] is found[1][0]
    assert found[0] == found[1][1] == big
    assert found[2].tolist() == [0, 0]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(1 << 19, dtype=np.float64),
        np.full(1 << 22, 1, np.uint8),
        np.full((1000, 2000), 1 + 1j, np.complex64, order="F"),
        np.full(1 << 20, "a"),
        np.zeros(1 << 18, [("a", "f8"), ("b", "i4")]),
        np.arange(1 << 19).astype("datetime64[s]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_megabytes(array: Any, protocol: int) -> None:
    """Work on their bytes is limited by what is stored of them."""
    (found,) = load([array], protocol)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


@pytest.mark.parametrize("levels", [2, 40, 60, 20_000])
def test_arrays_in_arrays(levels: int) -> None:
    """Python frees an array in an array in an array … by recursion, until the stack ends."""
    # `(state)b` of each goes around the one before.
    call = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85X\1\0\0\0b\x87R"
    dtype = b"cnumpy\ndtype\nX\1\0\0\0O\x85R"
    body = (call + b"(K\1)" + dtype + b"\x89]") * levels + b"N" + b"atb" * levels
    if levels > 50:
        with pytest.raises(CorruptCheckpointError, match="deep, which is not allowed"):
            load(b"\x80\2" + body + b".")
    else:
        found = load(b"\x80\2" + body + b".")
        for _ in range(levels):
            found = found[()]
        assert found is None
