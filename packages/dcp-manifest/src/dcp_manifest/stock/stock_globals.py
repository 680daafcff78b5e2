"""Allow-table for stock's pickles: their classes become records, their functions are replaced by functions here.

All other globals are refused. Covers torch 2.3 to 2.15, pickle protocols 2 to 5, CPython 3.9 to 3.14.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from dcp_manifest.index.consistency import MAX_NDIM
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.pickles.pickle_table import (
    Budget,
    ForbiddenGlobalError,
    Function,
    PickleTable,
    RecordClass,
    UnsafePickleError,
    described,
)
from dcp_manifest.pickles.safe_pickle import read_pickle
from dcp_manifest.stock.stock_class_paths import FILESYSTEM, GET_LAYOUT, METADATA, OLD_METADATA, PATH_CLASSES, TORCH

__all__ = ["DtypeName", "Layout", "Size", "read_stock_pickle"]

_MAX_DEPTH = 4
# Work budget of calls per byte of the pickle, without which a few bytes could demand any amount of memory.
_COPIED_PER_BYTE = 8
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


class DtypeName(NamedTuple):
    """Stand-in for a torch dtype in a pickle."""

    name: str


class Layout(NamedTuple):
    """Stand-in for a torch layout in a pickle."""

    name: str


class Size(NamedTuple):
    """Stand-in for a `torch.Size` in a pickle."""

    numbers: tuple[int, ...]


def read_stock_pickle(data: bytes) -> tuple[Any, int]:
    """Read a pickle that stock wrote; returns its value, and the offset of its end in `data`."""
    return read_pickle(data, _table(0), budget=Budget(len(data) * _COPIED_PER_BYTE))


@functools.cache
def _table(depth: int) -> PickleTable:
    """Return the allow-table for a depth of nested pickles."""
    loads = Function("pickle.loads", lambda budget, arguments: _loads(budget, arguments, depth + 1))
    names = {**_NAMES, "pickle.loads": loads, "_pickle.loads": loads}

    def find(path: str) -> Any:
        found = names.get(path)
        if found is None:
            raise ForbiddenGlobalError(path)
        return found

    return PickleTable(find)


def _loads(budget: Budget, arguments: tuple[Any, ...], depth: int) -> Any:
    """Read a pickle nested in the pickle, and return its value."""
    (data,) = arguments
    if type(data) is not bytes:
        raise TypeError("a nested pickle is not bytes")
    if depth > _MAX_DEPTH:
        raise UnsafePickleError("nests pickles too deeply")
    budget.spend(len(data))
    value, end = read_pickle(data, _table(depth), budget=budget)
    if end != len(data):
        raise ValueError("a nested pickle is followed by other bytes")
    return value


def _encode(budget: Budget, arguments: tuple[Any, ...]) -> bytes:
    """Return bytes: protocol 2 has no opcode for them, and stores this call of `encode` instead."""
    text, encoding = arguments
    if type(text) is not str or encoding != "latin1":
        raise UnsafePickleError("encodes text in an unexpected way")
    budget.spend(len(text))
    return text.encode("latin1")


def _size(_: Budget, arguments: tuple[Any, ...]) -> Size:
    (numbers,) = arguments
    if type(numbers) is not tuple or len(numbers) > MAX_NDIM or not all(type(number) is int for number in numbers):
        raise TypeError(f"a size is not a sequence of at most {MAX_NDIM} ints")
    return Size(numbers)


def _layout(_: Budget, arguments: tuple[Any, ...]) -> Layout:
    (name,) = arguments
    if type(name) is not str or not name.startswith("torch."):
        raise TypeError("a layout has no name")
    return Layout(name.removeprefix("torch."))


def _memory_format(_: Budget, arguments: tuple[Any, ...]) -> int:
    (number,) = arguments
    if type(number) is not int or not 0 <= number < len(_MEMORY_FORMATS):
        raise ValueError("a memory format is unknown")
    return number


def _getattr(_: Budget, arguments: tuple[Any, ...]) -> int:
    """Return an enum member, which some versions of Python pickle as an attribute of the enum class."""
    owner, name = arguments
    if owner is not _MEMORY_FORMAT or name not in _MEMORY_FORMATS:
        raise UnsafePickleError(f"gets an attribute of {described(owner)}")
    return _MEMORY_FORMATS.index(name)


def _path(_: Budget, __: tuple[Any, ...]) -> None:
    """Ignore the checkpoint's former path: it is not needed."""


_MEMORY_FORMAT = Function("_MEM_FORMAT_ENCODING", _memory_format)
_RECORDS = ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex")
_NAMES: dict[str, Any] = {
    **{f"{METADATA}.{name}": RecordClass(name) for name in (*_RECORDS, "StorageMeta", "TensorProperties")},
    f"{OLD_METADATA}.TensorProperties": RecordClass("TensorProperties"),
    f"{FILESYSTEM}._StorageInfo": RecordClass("_StorageInfo"),
    f"{METADATA}._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{METADATA}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{OLD_METADATA}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{TORCH}.Size": Function("torch.Size", _size),
    ".".join(GET_LAYOUT): Function("torch.serialization._get_layout", _layout),
    "builtins.getattr": Function("getattr", _getattr),
    "_codecs.encode": Function("_codecs.encode", _encode),
    **{f"{TORCH}.{name}": DtypeName(name) for name in ITEM_BYTES},
    **dict.fromkeys(map(".".join, PATH_CLASSES), Function("pathlib", _path)),
}
