"""Reader of `torch.save` files as a `Content`: the pickle is read with an allow-list, tensors are read on demand.

The file is memory-mapped, and torch locates each tensor in it. Tensors are read with ordinary file reads when they
are requested, so only a piece of one tensor is in memory at a time.

Source: torch 2.13 `torch.serialization._load` (effect of `overall_storage`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from dcp_core.toolkit import (
    ObjectArchive,
    TensorPieces,
    allowed_globals,
    dump_object,
    flatten,
    how_to_allow,
    name_empty_mappings,
    read_archive,
)
from dcp_format.checkpoints.chunk_pieces import ChunkPieces
from dcp_format.checkpoints.stored_chunks import ChunkReader
from dcp_format.content.content import Content, TensorEntry
from dcp_format.torch_save.archive_records import ArchiveRecords
from dcp_io import LocalStore, PiecewiseData, is_zip
from dcp_manifest import ForbiddenGlobalError, Framing, StoredChunk, StoredItem, file_path, open_descriptor

__all__ = ["is_torch_save", "map_torch_save", "open_torch_save"]

_NO_TENSORS = (bool, int, float, complex, str, bytes, type(None))


def is_torch_save(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like a zip archive, as `torch.save` files do. Only `open_torch_save` checks the rest."""
    with contextlib.suppress(OSError):
        # Opening a pipe in another way would wait for a writer.
        descriptor = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return stat.S_ISREG(os.fstat(descriptor).st_mode) and is_zip(os.pread(descriptor, 4, 0))
        finally:
            os.close(descriptor)
    return False


def open_torch_save(path: str | os.PathLike[str], *, allow_globals: Sequence[Any] = ()) -> Content:
    """Open a `torch.save` file as a `Content`: nested mappings are flattened as by `save`, tied tensors become aliases.

    Args:
        path: Path of the file.
        allow_globals: Classes and functions that are allowed in addition to the default allow-list.

    Raises:
        CheckpointNotFoundError: The file does not exist.
        CorruptCheckpointError: The file is not a `torch.save` file, or is damaged.
        UnsafeCheckpointError: The file names a global that is not allowed.
        UnsupportedFormatError: The file has another byte order than this machine, or its records are compressed.
        UnsupportedValueError: The saved value is not a mapping.
        InvalidPlaceError: `path` is a URI, or names no file.
    """
    path = file_path(path)
    state, records = map_torch_save(path, allow_globals=allow_globals)
    if not isinstance(state, Mapping):
        raise UnsupportedValueError(
            f"{path} holds a {type(state).__qualname__}, not a state dict: nothing names its values"
        )
    flat = flatten(state)
    place = Path(path)
    located = _Located(place, records)
    content = Content(str(place), {}, paths={**flat.paths, **name_empty_mappings(flat)}, close=located.close)
    seen: dict[Any, str] = {}
    for name, value in flat.values.items():
        if not _is_plain_tensor(value):
            if not isinstance(value, _NO_TENSORS):
                records.check_all()
            content.objects[name] = functools.partial(dump_object, value, key=name)
            continue
        tensor = value.detach()
        form = (
            *(tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()),
            *(tensor.dtype, tensor.is_conj(), tensor.is_neg()),
        )
        if tensor.numel() and form in seen:
            content.aliases[name] = seen[form]
            continue
        seen[form] = name
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        content.tensors[name] = TensorEntry(name, dtype, shape, located.data(name, tensor), value.requires_grad)
    located.prepare()
    return content


def map_torch_save(path: str | os.PathLike[str], *, allow_globals: Sequence[Any] = ()) -> tuple[Any, ArchiveRecords]:
    """Return the value in a `torch.save` file, and the file's records. Arguments and errors: see `open_torch_save`.

    Returns:
        The saved value, with tensors in a memory map of the file and objects whose CRCs were checked; and the records,
        with which the caller must check the CRCs of tensors before it uses them.
    """
    place = file_path(path)
    try:
        size = os.stat(place).st_size
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no file {place}: check the path") from error
    if not is_torch_save(place):
        raise CorruptCheckpointError("this is no torch.save archive (files of torch 1.5 and older are not)", file=place)
    allowed = allowed_globals(allow_globals)

    try:
        mapped: Any = torch.UntypedStorage.from_file(place, False, size)
        records = ArchiveRecords(mapped, file=place)
        records.check_small()

        def storage(archive: ObjectArchive, key: str, nbytes: int) -> torch.UntypedStorage:
            start = archive.stored(key, nbytes)
            found: torch.UntypedStorage = mapped[start : start + nbytes]
            return found

        _refuse_other_byte_order(records, place)
        return read_archive(records.view, allowed.table, storage), records
    except (CorruptCheckpointError, UnsupportedFormatError):
        raise
    except ForbiddenGlobalError as error:
        raise UnsafeCheckpointError(
            f"{place} names {error.path}, which is not allowed. {how_to_allow([error.path], with_planner=False)}"
        ) from None
    except Exception as error:
        raise CorruptCheckpointError(f"the file cannot be read: {error}", file=place) from error


def _refuse_other_byte_order(records: ArchiveRecords, place: str) -> None:
    """Raise for a file of the other byte order: values are read without conversion."""
    if ObjectArchive(records.view).swapped():
        raise UnsupportedFormatError(
            f"{place} was written with the other byte order; load it with torch.load and save it again"
        )


def _is_plain_tensor(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


class _Located:
    """Byte ranges of tensors in a mapped file."""

    def __init__(self, path: Path, records: ArchiveRecords) -> None:
        self._store = LocalStore(path.parent)
        self._name = path.name
        self._records: ArchiveRecords | None = records
        self._base = records.address
        self._bytes = records.nbytes
        self._reader = ChunkReader(self._store)
        self._chunks: list[StoredChunk] = []
        self._crcs = records.crcs

    def close(self) -> None:
        """Release the mapping."""
        self._records = None

    def data(self, name: str, tensor: torch.Tensor) -> PiecewiseData:
        """Return the values: read from the file where they are contiguous, through the mapping otherwise."""
        start = tensor.data_ptr() - self._base
        inside = start >= 0 and start + tensor.nbytes <= self._bytes
        if tensor.numel() and not (inside and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())):
            self._check_storage(tensor)
            return TensorPieces(tensor)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        size = tensor.nbytes
        crc32 = self._crcs.get((start, size))
        if crc32 is None:
            self._check_storage(tensor)
        start = start if size else 0
        item = StoredItem(self._name, start, size, 0, size, Framing.RAW, crc32)
        chunk = StoredChunk(name, dtype, (0,) * tensor.dim(), shape, item)
        self._chunks.append(chunk)
        return ChunkPieces(self._reader, dtype, shape, [chunk])

    def _check_storage(self, tensor: torch.Tensor) -> None:
        """Check the records of a tensor's storage now, if they will not be read whole later."""
        storage = tensor.untyped_storage()
        if self._records is not None:
            self._records.check_range(storage.data_ptr() - self._base, storage.nbytes())

    def prepare(self) -> None:
        """Prepare the reader for all located tensors."""
        self._reader.prepare(self._chunks)
