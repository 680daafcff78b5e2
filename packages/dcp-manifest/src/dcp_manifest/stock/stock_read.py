"""Reader of stock's `.metadata`; no code in the pickle runs.

Source: torch 2.13 `torch.distributed.checkpoint.metadata` (contents of the records) and `.filesystem._StorageInfo`;
CPython 3.13.0 `pathlib`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from dcp_manifest.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_manifest.index.columns import CheckpointIndex, Framing, ItemColumns, PathElement, TensorFlags
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.schema import MAX_NDIM, check_index, check_relative_path
from dcp_manifest.index.stored_tensors import TensorForm, tensor_columns
from dcp_manifest.pickles.pickle_table import (
    Budget,
    ForbiddenGlobalError,
    Function,
    Opaque,
    PickleTable,
    Record,
    RecordClass,
    UnsafePickleError,
    described,
)
from dcp_manifest.pickles.safe_pickle import read_pickle
from dcp_manifest.stock.stock_write import FILESYSTEM, GET_LAYOUT, METADATA, TORCH
from dcp_manifest.types import Buffer

Place = dict[str, Any]
_MAX_LINKS = 16
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"


def read_stock(data: Buffer, *, file: str) -> tuple[CheckpointIndex, int, list[str]]:
    """Read the index from the pickle of stock's `Metadata` (torch 2.3 to 2.15) with which `data` begins.

    Returns the index, without `info` and with unchecked items; the offset of the pickle's end; `StorageMeta.modules`.
    Raises CorruptCheckpointError or UnsafeCheckpointError; see `read_index`.
    """
    try:
        value, end = read_stock_pickle(bytes(data))
        metadata = _state(value, "Metadata")
        index = _Reader(len(data)).index(metadata)
        check_index(index)
    except UnsafePickleError as error:
        raise UnsafeCheckpointError(
            f"{file} {error}, which does not belong in a checkpoint's index; no code was run. If you trust its "
            "author, load the checkpoint with torch.distributed.checkpoint and save it again"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        detail = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CorruptCheckpointError(
            f"the index is not that of a checkpoint: {detail}; restore the file from a copy", file=file
        ) from error
    for path in index.files:
        check_relative_path(path, file=file)
    return index, end, _modules(metadata)


def _misplaced(value: object, wanted: str) -> Exception:
    if type(value) is Opaque:
        return ForbiddenGlobalError(value.name)
    return TypeError(f"{described(value)} is in the place of {wanted}")


def _dict(value: object) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _misplaced(value, "a dict")
    return value


def _list(value: object) -> list[Any]:
    if type(value) is tuple:
        return [*value]
    if type(value) is not list:
        raise _misplaced(value, "a list")
    return value


def _state(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.name != name:
        raise _misplaced(value, f"a {name}")
    state = {} if value.state is None else value.state
    if type(state) is not dict:
        raise TypeError(f"the state of a {name} is not a dict")
    return state


def _modules(metadata: dict[str, Any]) -> list[str]:
    meta = metadata.get("storage_meta")
    modules = meta.state.get("modules") if isinstance(meta, Record) and type(meta.state) is dict else None
    return [module for module in modules if type(module) is str] if type(modules) is list else []


def _numbers(value: object) -> tuple[int, ...]:
    if isinstance(value, Size):
        return value.numbers
    if type(value) is tuple or type(value) is list:
        return _size(Budget(0), (tuple(value),)).numbers
    raise _misplaced(value, "a size")


class _Reader:
    """A hostile pickle may refer to one list any number of times, so `limit` bounds the rows."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.files: dict[str, int] = {}
        self.chains: dict[tuple[str, ...], int] = {}

    def index(self, metadata: dict[str, Any]) -> CheckpointIndex:
        values = _dict(metadata["state_dict_metadata"])
        tensors: dict[str, dict[str, Any]] = {}
        objects: list[str] = []
        for name, value in values.items():
            if type(name) is not str:
                raise _misplaced(name, "the name of a tensor or of an object")
            if not isinstance(value, Record):
                raise _misplaced(value, "the entry of a tensor or of an object")
            if value.name == "BytesStorageMetadata":
                objects.append(name)
            else:
                tensors[name] = _state(value, "TensorStorageMetadata")
        forms = self.forms(tensors)
        index = tensor_columns(forms)
        index.object_names, index.object_owner = objects, np.zeros(len(objects), np.uint32)
        index.paths = self.paths(metadata.get("planner_data"))
        if metadata.get("storage_data") is not None:
            places = _places(_dict(metadata["storage_data"]))
            chunks = [_place(places, (form.name, offsets)) for form in forms for offsets, _ in form.boxes]
            index.chunk_items = self.items(chunks, Framing.TORCH_ZIP)
            index.object_items = self.items([_place(places, (name, None)) for name in objects], Framing.OBJECT)
        index.files, index.chains = tuple(self.files), tuple(self.chains)
        return index

    def forms(self, tensors: dict[str, dict[str, Any]]) -> list[TensorForm]:
        if sum(len(_list(state["chunks"])) for state in tensors.values()) > self.limit:
            raise ValueError("it has more chunks than bytes")
        forms = []
        for name, state in tensors.items():
            dtype, flags = _properties(state["properties"])
            chunks = (_state(chunk, "ChunkStorageMetadata") for chunk in state["chunks"])
            boxes = [(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in chunks]
            form = TensorForm(name, dtype, _numbers(state["size"]), boxes, flags)
            if any(not len(offsets) == len(sizes) == len(form.shape) for offsets, sizes in boxes):
                raise ValueError("a chunk has other dimensions than its tensor")
            forms.append(form)
        return forms

    def items(self, places: list[Place], framing: Framing) -> ItemColumns:
        count = len(places)
        length = np.array([_number(place["length"]) for place in places], np.uint64)
        chains = [_chain(place.get("transform_descriptors")) for place in places]
        return ItemColumns(
            file=np.array(
                [self.files.setdefault(_text(place["relative_path"]), len(self.files)) for place in places], np.uint32
            ),
            offset=np.array([_number(place["offset"]) for place in places], np.uint64),
            length=length,
            lead=np.zeros(count, np.uint32),
            stored_bytes=length.copy(),
            framing=np.full(count, framing, np.uint8),
            chain=np.array(
                [self.chains.setdefault(chain, len(self.chains)) + 1 if chain else 0 for chain in chains], np.uint8
            ),
            checked=np.zeros(count, np.uint8),
            crc32=np.zeros(count, np.uint32),
            running_crcs=np.zeros(0, np.uint32),
        )

    def paths(self, planner_data: object) -> dict[str, tuple[PathElement, ...]] | None:
        if type(planner_data) is not dict or not all(type(path) is tuple for path in planner_data.values()):
            return None
        if sum(map(len, planner_data.values())) > self.limit:
            raise ValueError("its paths have more elements than it has bytes")
        names = all(type(name) is str for name in planner_data)
        parts = all(type(part) in {str, int} for path in planner_data.values() for part in path)
        return planner_data if names and parts else None


def _properties(value: object) -> tuple[str, int]:
    """Newer versions append fields to the five known ones."""
    if not isinstance(value, Record) or value.name != "TensorProperties" or type(value.state) is not tuple:
        raise _misplaced(value, "a TensorProperties")
    dtype, layout, requires_grad, memory_format, pin_memory = value.state[:5]
    if not isinstance(dtype, DtypeName):
        raise _misplaced(dtype, "a dtype")
    if not isinstance(layout, Layout):
        raise _misplaced(layout, "a layout")
    flags = TensorFlags(
        requires_grad=bool(requires_grad),
        pin_memory=bool(pin_memory),
        memory_format=memory_format,
        layout=layout.name,
    )
    return dtype.name, flags.to_bits()


def _text(value: object) -> str:
    if type(value) is not str:
        raise _misplaced(value, "a string")
    return value


def _number(value: object) -> int:
    if type(value) is not int:
        raise _misplaced(value, "a number of bytes")
    return value


def _chain(value: object) -> tuple[str, ...]:
    """Decoding order is the reverse of stock's."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_LINKS or not all(type(link) is str for link in value):
        raise TypeError("an item's transforms are not a short list of names")
    return tuple(reversed(value))


def _places(storage_data: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    places: dict[tuple[str, tuple[int, ...] | None], Place] = {}
    for key, value in storage_data.items():
        index = _state(key, "MetadataIndex")
        offset = index.get("offset")
        places[_text(index["fqn"]), None if offset is None else _numbers(offset)] = _state(value, "_StorageInfo")
    return places


def _place(places: dict[tuple[str, tuple[int, ...] | None], Place], key: tuple[str, tuple[int, ...] | None]) -> Place:
    place = places.get(key)
    if place is None:
        name, offsets = key
        at = "" if offsets is None else f" at offsets {offsets}"
        raise ValueError(f"it has no location of {name!r}{at}")
    return place


_MAX_DEPTH = 4
# Work budget of calls per byte of the pickle, without which a few bytes could demand any amount of memory.
_COPIED_PER_BYTE = 8
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")


class DtypeName(NamedTuple):
    """Stand-in for a torch dtype."""

    name: str


class Layout(NamedTuple):
    """Stand-in for a torch layout."""

    name: str


class Size(NamedTuple):
    """Stand-in for a `torch.Size`."""

    numbers: tuple[int, ...]


def read_stock_pickle(data: bytes) -> tuple[Any, int]:
    """Return a pickle's value, and the offset of its end."""
    return read_pickle(data, _table(0), budget=Budget(len(data) * _COPIED_PER_BYTE))


@functools.cache
def _table(depth: int) -> PickleTable:
    loads = Function("pickle.loads", lambda budget, arguments: _loads(budget, arguments, depth + 1))
    names = {**_NAMES, "pickle.loads": loads, "_pickle.loads": loads}

    def find(path: str) -> Any:
        return names.get(path) or Opaque(path)

    return PickleTable(
        find,
        states={dict: _ignore_attributes},
    )


def _loads(budget: Budget, arguments: tuple[Any, ...], depth: int) -> Any:
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


def _getattr(_: Budget, arguments: tuple[Any, ...]) -> Any:
    """Some Python versions pickle an enum member as an attribute."""
    owner, name = arguments
    if type(owner) is Opaque:
        return owner
    if owner is not _MEMORY_FORMAT or name not in _MEMORY_FORMATS:
        raise UnsafePickleError(f"gets an attribute of {described(owner)}")
    return _MEMORY_FORMATS.index(name)


def _mapping(_: Budget, __: tuple[Any, ...]) -> dict[Any, Any]:
    """Return a dict for a subclass of dict, whose items follow; its factory is ignored."""
    return {}


def _ignore_attributes(_: Budget, mapping: dict[Any, Any], state: object) -> dict[Any, Any]:
    """Return the mapping without attributes; refuse names that would be called, such as `__setstate__`."""
    if any(not isinstance(name, str) or name.startswith("__") for name in _dict(state)):
        raise _misplaced(state, "attributes")
    return mapping


def _path(_: Budget, __: tuple[Any, ...]) -> None:
    """Ignore the former path."""


_MEMORY_FORMAT = Function("_MEM_FORMAT_ENCODING", _memory_format)
_RECORDS = ("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex")
_NAMES: dict[str, Any] = {
    **{f"{METADATA}.{name}": RecordClass(name) for name in (*_RECORDS, "StorageMeta", "TensorProperties")},
    f"{_OLD_METADATA}.TensorProperties": RecordClass("TensorProperties"),
    f"{FILESYSTEM}._StorageInfo": RecordClass("_StorageInfo"),
    f"{METADATA}._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{METADATA}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_OLD_METADATA}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{TORCH}.Size": Function("torch.Size", _size),
    ".".join(GET_LAYOUT): Function("torch.serialization._get_layout", _layout),
    "builtins.getattr": Function("getattr", _getattr),
    "collections.OrderedDict": Function("collections.OrderedDict", _mapping),
    "collections.defaultdict": Function("collections.defaultdict", _mapping),
    "_codecs.encode": Function("_codecs.encode", _encode),
    **{f"{TORCH}.{name}": DtypeName(name) for name in ITEM_BYTES},
    **{
        f"{module}.{name}": Function("pathlib", _path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
}
