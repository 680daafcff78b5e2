"""Contents of a checkpoint from its index."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcp_base import DcpError
from dcp_inspect.arguments import is_uri
from dcp_manifest import (
    CheckpointIndex,
    CheckpointNotFoundError,
    FoundCheckpoint,
    LocalFolder,
    UnsupportedFormatError,
    checkpoints_below,
    index_of,
)
from dcp_manifest.folders.find_checkpoints import check_files
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME
from dcp_manifest.index.dtypes import ITEM_BYTES

_READ_BY = "; `dcp show`, `dcp cat`, `dcp diff` and `dcp convert` read other formats, too"


class OtherFormatError(UnsupportedFormatError):
    """The path has files of another format."""


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor, an object, or an alias of a tensor."""

    name: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    chunks: int = 0
    bytes: int = 0
    """Size of the values, or of a stored object."""
    stored_bytes: int = 0
    rank: int | None = None
    """Owner; None for a value of the whole job."""
    target: str | None = None
    value: str | None = None
    """Object as text, or class of a tensor subclass."""

    def as_json(self) -> dict[str, object]:
        """Return JSON data."""
        shape = None if self.shape is None else list(self.shape)
        facts = {name: getattr(self, name) for name in ("name", "kind", "dtype", "chunks", "bytes", "stored_bytes")}
        return {**facts, "shape": shape, "rank": self.rank, "target": self.target, "value": self.value}


def open_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read the index of the checkpoint in a folder or at a URI.

    Raises OtherFormatError for files of another format, CheckpointNotFoundError otherwise.
    """
    if is_uri(path):
        return _index_at(os.fspath(path))
    place = Path(path)
    if place.name == METADATA_NAME and place.is_file():
        place = place.parent
    if not place.exists():
        raise CheckpointNotFoundError(f"there is nothing at {place}: check the path")
    if place.is_file():
        if place.suffix == DATA_SUFFIX and (place.parent / METADATA_NAME).exists():
            raise CheckpointNotFoundError(
                f"{place} is a data file of the checkpoint in {place.parent}: `dcp show {place.parent}` shows it"
            )
        raise OtherFormatError(f"{place} is a file, not a checkpoint's directory{_READ_BY}")
    try:
        return index_of(place)
    except CheckpointNotFoundError as error:
        _say_what_is_there(str(place), LocalFolder(place), os.listdir(place), error)
        raise


def _index_at(uri: str) -> CheckpointIndex:
    # Folders need none of its engines.
    from dcp_io import StoreBackend, open_store  # noqa: PLC0415
    from dcp_io.stores.open_store import file_at  # noqa: PLC0415

    store = open_store(uri)
    try:
        return StoreBackend(store).read_index()
    except CheckpointNotFoundError as error:
        if file_at(uri) is not None:
            raise OtherFormatError(f"{uri} is a file, not a checkpoint's directory{_READ_BY}") from error
        _say_what_is_there(uri, store, [entry.name for entry in store.list()], error)
        raise


def _say_what_is_there(place: str, folder: Any, names: Sequence[str], error: CheckpointNotFoundError) -> None:
    found = checkpoints_below(folder, unfinished=True)
    if any(one.unfinished and not one.place.parts for one in found):
        from dcp_inspect.removal import unfinished_save  # noqa: PLC0415 - folders need no stores otherwise
        from dcp_io import open_store  # noqa: PLC0415

        save = unfinished_save(open_store(place))
        raise CheckpointNotFoundError(
            f"{place} holds an unfinished save and no checkpoint: {save.reason or 'no save is running'}; "
            f"{save.removal(place)}"
        ) from error
    below = [one for one in found if not one.unfinished]
    if below:
        several = f"the {len(below)} checkpoints" if len(below) > 1 else "the checkpoint"
        raise CheckpointNotFoundError(
            f"{place} is no checkpoint; `dcp ls {place}` lists {several} below it, {_newest(below)}; `dcp verify -r "
            f"{place}` checks all of them"
        ) from error
    if any(name.endswith(".safetensors") for name in names):
        raise OtherFormatError(f"{place} holds safetensors files, not a checkpoint{_READ_BY}") from error


def _newest(below: Sequence[FoundCheckpoint[Any]]) -> str:
    for one in below:
        with contextlib.suppress(DcpError, OSError):
            if one.put_aside is None:
                check_files(one.store, index_of(one.store))
                return f"the newest complete one is {one.store.url.rstrip('/').removeprefix('./')}"
    return "none of which is complete"


def rows_of(index: CheckpointIndex) -> Iterator[Row]:
    """Return a row per value, tensors first, in index order."""
    chunk_starts, shape_starts = index.chunk_starts().tolist(), index.shape_starts().tolist()
    lengths = [] if index.chunk_items is None else index.chunk_items.length.tolist()
    for number, name in enumerate(index.tensor_names):
        dtype = index.dtypes[index.tensor_dtype[number]]
        shape = tuple(index.tensor_shape[shape_starts[number] : shape_starts[number + 1]].tolist())
        first, last = chunk_starts[number], chunk_starts[number + 1]
        owner = int(index.tensor_owner[number])
        yield Row(
            name,
            "tensor",
            dtype,
            shape,
            last - first,
            math.prod(shape) * ITEM_BYTES.get(dtype, 0),
            sum(lengths[first:last]),
            owner - 1 if owner else None,
        )
    sizes = [] if index.object_items is None else index.object_items.length.tolist()
    for number, name in enumerate(index.object_names):
        owner = int(index.object_owner[number])
        size = sizes[number] if sizes else 0
        yield Row(name, "object", bytes=size, stored_bytes=size, rank=owner - 1 if owner else None)
    for name, target in zip(index.alias_names, index.alias_targets.tolist(), strict=True):
        yield Row(name, "alias", target=index.tensor_names[target])


def folder_of(path: str | os.PathLike[str]) -> str:
    """Return the folder for a path that may name its index."""
    place = os.fspath(path)
    if not is_uri(place) and os.path.basename(place) == METADATA_NAME and os.path.isfile(place):
        return os.path.dirname(place) or "."
    return place


def select(rows: Sequence[Row], patterns: Sequence[str]) -> list[Row]:
    """Select the rows that match any shell pattern; all rows without patterns."""
    if not patterns:
        return [*rows]
    return [row for row in rows if any(fnmatch.fnmatchcase(row.name, pattern) for pattern in patterns)]
