"""Values of all formats as numpy arrays and Python objects; torch and `dcp-format` are imported on demand.

Source: OCP 8-bit floating point specification 1.0 and OCP microscaling formats 1.0 (values of the 8-bit floats); torch
2.13 `torch/headeronly/util/Float8_*fnuz.h` (the variants without infinities and negative zero).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import math
import os
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_inspect.arguments import is_uri
from dcp_inspect.contents import OtherFormatError, folder_of, open_index
from dcp_inspect.reading.stored_content import StoredContent, SupportsRows, stored_content
from dcp_io import open_store
from dcp_io.archives.stored_objects import read_plain_object
from dcp_io.requests import whole_bytes
from dcp_manifest import CheckpointNotFoundError, UnsupportedFormatError
from dcp_manifest.index.dtypes import ITEM_BYTES

Array = npt.NDArray[Any]
_COMPRESSED = "reading compressed tensors, and objects that hold tensors,"


def open_values(path: str | os.PathLike[str]) -> Any:
    """Open a path as a `StoredContent`, or as a `dcp_format.Content` of another format.

    Raises UnsupportedFormatError if no installed converter recognises it, or dcp-format is missing.
    """
    try:
        return _open_checkpoint(os.fspath(path))
    except OtherFormatError:
        return open_other_format(path)
    except CheckpointNotFoundError:
        if is_uri(path) or not os.path.isdir(path):
            raise
        try:  # a plug-in may know the folder's format
            return open_other_format(path)
        except UnsupportedFormatError:
            pass
        raise


def _open_checkpoint(path: str) -> StoredContent:
    index = open_index(path)
    path = folder_of(path)
    return stored_content(open_store(path), index, lambda: formats(_COMPRESSED).open_content(path))


def whole_array(entry: Any) -> Array:
    """Read a whole tensor."""
    return array_of(whole_bytes(entry.data), entry.dtype, entry.shape)


def array_rows(entry: Any, start: int, stop: int) -> Array:
    """Read rows [start, stop), and no others if the format allows."""
    if not isinstance(entry.data, SupportsRows):
        return whole_array(entry)[start:stop]
    return array_of(bytearray(entry.data.rows(start, stop)), entry.dtype, (stop - start, *entry.shape[1:]))


def load_value(data: bytes, name: str) -> Any:
    """Return the value of a stored object.

    Raises UnsafeCheckpointError for a class or function that is not allowed, UnsupportedFormatError if dcp-format is
    missing.
    """
    try:
        return read_plain_object(data)
    except ValueError:
        formats(f"the object {name!r} is no plain number, text or container, and reading it")
        return importlib.import_module("dcp_core.objects.object_bytes").load_object(data, key=name)


def same_value(one: Any, other: Any) -> bool:
    """Whether two objects are equal by type and bits: 0.0 is not -0.0, 1 is neither True nor 1.0, NaN is itself."""
    with contextlib.suppress(Exception):  # the core compares values that cannot be pickled plainly
        pair = [_pickled(one), _pickled(other)]
        # The opcodes may be bytes of something else; sets are compared regardless of their order.
        if not any(opcode in data for data in pair for opcode in (pickle.EMPTY_SET, pickle.FROZENSET)):
            return pair[0] == pair[1]
    formats("comparing these objects")
    return bool(importlib.import_module("dcp_core.planning.replicas").same_value(one, other))


class _PlainPickler(pickle.Pickler):
    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        raise TypeError(type(obj).__name__)


def _pickled(value: Any) -> bytes:
    into = io.BytesIO()
    _PlainPickler(into).dump(value)
    return into.getvalue()


_PYTORCH = "PyTorch, which is not installed (https://pytorch.org/get-started says how)"


def formats(purpose: str) -> Any:
    """Import the converting part of dcp-format. Raises UnsupportedFormatError."""
    try:
        return importlib.import_module("dcp_format.conversion")  # torch included, which its front door leaves for later
    except ImportError as error:
        missing = (error.name or "dcp_format").partition(".")[0]
        if missing == "torch":
            lack = _PYTORCH
        else:
            # Not `pip install NAME`, as long as the index may give that name to somebody else.
            name = missing.replace("_", "-")
            lack = f"{name}, which is not installed: install it from the source of your other dcp packages"
            lack = lack if name.startswith("dcp-") else f"{name}, which is not installed"
        raise UnsupportedFormatError(f"{purpose} needs {lack}") from error


def check_exists(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointNotFoundError if a path does not exist; accept any URI."""
    if not is_uri(path) and not os.path.lexists(path):
        raise CheckpointNotFoundError(f"there is nothing at {os.fspath(path)}: check the path")


def open_other_format(path: str | os.PathLike[str]) -> Any:
    """Open a path of another format as a `dcp_format.Content`."""
    try:
        package = formats(f"{os.fspath(path)} is of another format, and reading it")
    except UnsupportedFormatError:
        if os.path.isfile(path) and not _may_be_known(path):
            raise UnsupportedFormatError(
                f"{os.fspath(path)} is no checkpoint's directory, torch.save file or safetensors file"
            ) from None
        raise
    return package.open_content(path)


def _may_be_known(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        head = file.read(9)
    return head.startswith((b"PK", b"\x80")) or head[8:] == b"{"


_INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_NUMPY = frozenset((*_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))
_WIDENED = ("bfloat16", "complex32")
# Exponent bits, mantissa bits, bias.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}
_SCALES = "float8_e8m0fnu"


def is_number(dtype: str) -> bool:
    """Whether `array_of` returns numbers rather than bits."""
    return dtype in _NUMPY or dtype in _WIDENED or dtype in _FLOAT8 or dtype == _SCALES


def array_of(data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...] = (-1,)) -> Array:
    """Return row-major little-endian bytes as an array, without a copy if numpy has the dtype.

    bfloat16 and 8-bit floats become float32, complex32 complex64; packed or quantized dtypes stay bits.
    """
    return _elements(data, dtype).reshape(shape)


def _elements(data: bytes | bytearray | memoryview, dtype: str) -> Array:
    if dtype in _NUMPY:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return np.frombuffer(data, "<f2").astype(np.float32).view(np.complex64)
    if dtype in _FLOAT8 or dtype == _SCALES:
        return _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    size = ITEM_BYTES[dtype]
    return np.frombuffer(data, f"<u{size}" if size <= 8 else f"V{size}")


@functools.cache
def _float8_values(dtype: str) -> npt.NDArray[np.float32]:
    if dtype == _SCALES:
        return np.array([*(2.0 ** (bits - 127) for bits in range(255)), math.nan], np.float32)
    return np.array([_float8_value(bits, dtype) for bits in range(256)], np.float32)


def _float8_value(bits: int, dtype: str) -> float:
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if bits == 0x80:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        if dtype == "float8_e5m2":
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))
