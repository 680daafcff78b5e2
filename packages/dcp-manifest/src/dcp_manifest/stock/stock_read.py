"""Reader of stock's `.metadata`, which converts it to an index. `safe_pickle` reads the pickle: no code in it runs.

Source: torch 2.13 `torch.distributed.checkpoint.metadata` (contents of the records) and `.filesystem._StorageInfo`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dcp_manifest.errors import CorruptCheckpointError, UnsafeCheckpointError
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, PathElement, TensorFlags
from dcp_manifest.index.consistency import check_index
from dcp_manifest.index.items import Framing
from dcp_manifest.index.relative_paths import check_relative_path
from dcp_manifest.index.stored_tensors import TensorForm, tensor_columns
from dcp_manifest.pickles.pickle_table import BrokenPickleError, Record, UnsafePickleError, described
from dcp_manifest.stock.stock_globals import DtypeName, Layout, Size, read_stock_pickle

__all__ = ["read_stock"]

Buffer = bytes | bytearray | memoryview
Place = dict[str, Any]
_MAX_LINKS = 16


def read_stock(data: Buffer, *, file: str) -> tuple[CheckpointIndex, int, list[str]]:
    """Read the index from a pickle of stock's `Metadata`, of torch 2.3 to 2.15.

    Args:
        data: Bytes that begin with the pickle; other bytes may follow it.
        file: Name of the file, for messages.

    Returns:
        The index, without `info` and with unchecked items; the offset of the end of the pickle; `StorageMeta.modules`.

    Raises:
        CorruptCheckpointError: The bytes are not a pickle of a valid `Metadata`.
        UnsafeCheckpointError: The pickle has a class or call that does not belong in an index, or the name of a data
            file leads out of the checkpoint's folder.
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
    except BrokenPickleError as error:
        raise CorruptCheckpointError(
            f"the index is not a complete pickle: {error}; restore the file from a copy", file=file, offset=error.offset
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        detail = f"it has no {error}" if isinstance(error, KeyError) else error
        raise CorruptCheckpointError(f"the index is not that of a checkpoint: {detail}", file=file) from error
    for path in index.files:
        check_relative_path(path, file=file)
    return index, end, _modules(metadata)


def _state(value: object, name: str) -> dict[str, Any]:
    """Return the state of a record of class `name`."""
    if not isinstance(value, Record) or value.name != name:
        raise TypeError(f"{described(value)} is in the place of a {name}")
    state = {} if value.state is None else value.state
    if type(state) is not dict:
        raise TypeError(f"the state of a {name} is not a dict")
    return state


def _modules(metadata: dict[str, Any]) -> list[str]:
    meta = metadata.get("storage_meta")
    modules = meta.state.get("modules") if isinstance(meta, Record) and type(meta.state) is dict else None
    return [module for module in modules if type(module) is str] if type(modules) is list else []


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, Size):
        raise TypeError(f"{described(value)} is in the place of a size")
    return value.numbers


class _Reader:
    """Tables of an index while its rows are collected.

    Args:
        limit: Limit of the rows of a table: a hostile pickle may refer to one list any number of times.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.files: dict[str, int] = {}
        self.chains: dict[tuple[str, ...], int] = {}

    def index(self, metadata: dict[str, Any]) -> CheckpointIndex:
        values = metadata["state_dict_metadata"]
        tensors: dict[str, dict[str, Any]] = {}
        objects: list[str] = []
        for name, value in values.items():
            if type(name) is not str or not isinstance(value, Record):
                raise TypeError(f"an entry is {described(value)}, not the entry of a tensor or of an object")
            if value.name == "BytesStorageMetadata":
                objects.append(name)
            else:
                tensors[name] = _state(value, "TensorStorageMetadata")
        forms = self.forms(tensors)
        index = tensor_columns(forms)
        index.object_names, index.object_owner = objects, np.zeros(len(objects), np.uint32)
        index.paths = self.paths(metadata.get("planner_data"))
        if metadata.get("storage_data") is not None:
            places = _places(metadata["storage_data"])
            chunks = [_place(places, (form.name, offsets)) for form in forms for offsets, _ in form.boxes]
            index.chunk_items = self.items(chunks, Framing.TORCH_ZIP)
            index.object_items = self.items([_place(places, (name, None)) for name in objects], Framing.OBJECT)
        index.files, index.chains = tuple(self.files), tuple(self.chains)
        return index

    def forms(self, tensors: dict[str, dict[str, Any]]) -> list[TensorForm]:
        """Return the tensors with the boxes of their chunks."""
        if sum(len(state["chunks"]) for state in tensors.values()) > self.limit:
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
        """Return the paths, if the planner data is that of stock's planner; that of other planners is ignored."""
        if type(planner_data) is not dict or not all(type(path) is tuple for path in planner_data.values()):
            return None
        if sum(map(len, planner_data.values())) > self.limit:
            raise ValueError("its paths have more elements than it has bytes")
        names = all(type(name) is str for name in planner_data)
        parts = all(type(part) in {str, int} for path in planner_data.values() for part in path)
        return planner_data if names and parts else None


def _properties(value: object) -> tuple[str, int]:
    """Return the row of the dtype, and flags. Newer versions append fields to the five that are known."""
    if not isinstance(value, Record) or value.name != "TensorProperties" or type(value.state) is not tuple:
        raise TypeError(f"{described(value)} is where a TensorProperties should be")
    dtype, layout, requires_grad, memory_format, pin_memory = value.state[:5]
    if not isinstance(dtype, DtypeName) or not isinstance(layout, Layout):
        raise TypeError("a tensor without dtype or layout")
    flags = TensorFlags(
        requires_grad=bool(requires_grad),
        pin_memory=bool(pin_memory),
        memory_format=memory_format,
        layout=layout.name,
    )
    return dtype.name, flags.to_bits()


def _text(value: object) -> str:
    if type(value) is not str:
        raise TypeError(f"{described(value)} is in the place of a string")
    return value


def _number(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{described(value)} is in the place of a number of bytes")
    return value


def _chain(value: object) -> tuple[str, ...]:
    """Return the transforms of an item in decoding order, the reverse of stock's order."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)) or len(value) > _MAX_LINKS or not all(type(link) is str for link in value):
        raise TypeError("an item's transforms are not a short list of names")
    return tuple(reversed(value))


def _places(storage_data: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Place]:
    """Return (FQN, offset) → storage location; the offset is None for an object."""
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
