"""Location of a tensor's bytes in a large `torch.save` archive, found by reading only its first and last bytes.

This permits reading ranges of a tensor that stock has saved. Only ordinary archives are supported: one uncompressed
record with the elements of one dense row-major tensor. The archive's pickle is read without calling functions of torch.

Source: torch 2.13 `torch.serialization._save`, `torch._utils._rebuild_tensor_v2` and `_v3` (the pickle's contents).
"""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_io.archives.zip_format import LOCAL, local_lengths
from dcp_io.requests import ReadRequest
from dcp_manifest.index.dtypes import TYPED_STORAGES
from dcp_manifest.index.items import Framing, ItemKind, StoredItem
from dcp_manifest.index.runs import Runs
from dcp_manifest.pickles.pickle_table import Function, PickleTable
from dcp_manifest.pickles.safe_pickle import read_pickle

__all__ = ["ArchiveSearch", "ArchivedTensor", "locate_tensor"]

# Smaller archives are read whole: that takes one read instead of two.
_SEARCH_MIN_BYTES = 1 << 20
# Bytes read of each end, by each rank: less than 1 KiB is before the elements, and less than 1 KiB behind them.
_END_BYTES = 2 << 10
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """Location, dtype and sizes of a tensor whose elements are stored uncompressed in a zip archive."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    item: StoredItem
    """Record of an item that consists of only the tensor's elements, with the CRC of the archive's record."""


class ArchiveSearch:
    """Search for tensors in large zip archives, by reading the first and last bytes of each archive.

    Call `add` for each archive, execute the read requests in `requests`, then use the results in `found`.
    """

    def __init__(self) -> None:
        self.requests: list[ReadRequest] = []
        self._places: set[tuple[str, int]] = set()
        self.found: dict[tuple[str, int], ArchivedTensor] = {}
        """(File, byte offset) of an archive → location of the tensor in that archive."""

    def add(self, key: str, stored: StoredItem) -> None:
        """Add an archive to the search; does nothing for small archives, and if it was added before.

        Args:
            key: FQN of the tensor, for error messages.
            stored: Record of the stored item, which is a zip archive.
        """
        size = stored.stored_bytes
        holds_tensor = stored.kind is ItemKind.ARCHIVE and stored.framing is Framing.TORCH_ZIP
        place = stored.file, stored.offset
        if size < _SEARCH_MIN_BYTES or not holds_tensor or stored.crc32 is not None or place in self._places:
            return
        self._places.add(place)
        ends = {0: bytearray(_END_BYTES), size - _END_BYTES: bytearray(_END_BYTES)}

        def take(position: int, data: memoryview) -> None:
            for start, end in ends.items():
                first, last = max(start, position), min(start + _END_BYTES, position + len(data))
                if first < last:
                    end[first - start : last - start] = data[first - position : last - position]

        def locate(_: memoryview) -> None:
            located = locate_tensor(stored, *map(bytes, ends.values()))
            if located is not None:
                self.found[place] = located

        # Read as bare bytes: a part of an archive has no CRC of its own. The parts that are used are checked then.
        bare = replace(stored, framing=Framing.RAW)
        runs = Runs(0, _END_BYTES, (2,), (size - _END_BYTES,))
        self.requests.append(ReadRequest(key, bare, 0, size, None, locate, take, runs))


def locate_tensor(stored: StoredItem, head: bytes, tail: bytes) -> ArchivedTensor | None:
    """Return the location of the tensor's elements in a zip archive; None if the archive is not ordinary or is damaged.

    Args:
        stored: Record of the stored item, which is the archive.
        head: First bytes of the archive.
        tail: Last bytes of the archive.
    """
    try:
        return _locate(stored, _Ends(head, tail, stored.stored_bytes))
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it is not ordinary
        return None


def _locate(stored: StoredItem, ends: _Ends) -> ArchivedTensor | None:
    with zipfile.ZipFile(ends) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        tensor, _ = read_pickle(archive.read(names["data.pkl"]), _TABLE, persistent=_storage)
        (values,) = (name for name in names if name.startswith("data/"))
        record = archive.getinfo(names[values])
        little = "byteorder" not in names or archive.read(names["byteorder"]) == b"little"
        checked = any(entry.CRC for entry in archive.infolist() if entry.file_size)
        ordinary = little and len(names) == len(archive.namelist()) and _is_stored(record)
    if not ordinary or not isinstance(tensor, _Rebuilt) or not tensor.is_ordinary():
        return None
    start = _data_start(ends, record)
    size = math.prod(tensor.sizes) * tensor.dtype.itemsize
    if values != f"data/{tensor.storage.key}" or record.file_size != size or start + size > stored.stored_bytes:
        return None
    item = StoredItem(
        file=stored.file,
        offset=stored.offset + stored.lead + start,
        length=size,
        lead=0,
        stored_bytes=size,
        framing=Framing.RAW,
        crc32=record.CRC if checked else None,
    )
    return ArchivedTensor(tensor.dtype, tensor.sizes, item)


def _is_stored(record: zipfile.ZipInfo) -> bool:
    encrypted = record.flag_bits & 1
    return record.compress_type == zipfile.ZIP_STORED and record.compress_size == record.file_size and not encrypted


def _data_start(ends: _Ends, record: zipfile.ZipInfo) -> int:
    ends.seek(record.header_offset)
    lengths = local_lengths(ends.read(LOCAL.size))
    if lengths is None or ends.read(lengths[0]) != record.orig_filename.encode():
        raise zipfile.BadZipFile("a record's header is damaged")
    return record.header_offset + LOCAL.size + sum(lengths)


class _Ends(io.RawIOBase):
    """A file of which only both ends are available."""

    def __init__(self, head: bytes, tail: bytes, size: int) -> None:
        super().__init__()
        self._head, self._tail, self._size = head, tail, size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = (0, self._position, self._size)[whence] + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        start = self._position
        stop = self._size if size < 0 else min(self._size, start + size)
        tail_start = self._size - len(self._tail)
        if start >= 0 and stop <= len(self._head):
            found = self._head[start:stop]
        elif start >= tail_start:
            found = self._tail[start - tail_start : stop - tail_start]
        else:
            raise EOFError("these bytes are not at an end of the archive")
        self._position = stop
        return found


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """The tensor that a pickle describes."""

    storage: _Storage
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool

    def is_ordinary(self) -> bool:
        """Whether the tensor's elements are those of its storage, in order."""
        if len(self.sizes) > _MAX_DIMS or not isinstance(self.dtype, torch.dtype):
            return False
        step = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if type(size) is not int or not 0 <= size < 1 << 63 or (size > 1 and stride != step):
                return False
            step *= size
        return self.plain and self.offset == 0


def _rebuild_v2(storage: Any, offset: int, sizes: Any, strides: Any, _grad: Any, _hooks: Any, *more: Any) -> _Rebuilt:
    return _Rebuilt(storage, storage.dtype, offset, tuple(sizes), tuple(strides), not any(more))


def _rebuild_v3(
    storage: Any, offset: int, sizes: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *more: Any
) -> _Rebuilt:
    return _Rebuilt(storage, dtype, offset, tuple(sizes), tuple(strides), not any(more))


def _no_hooks() -> dict[str, Any]:
    """Return the empty mapping that stands for the hooks of a tensor."""
    return {}


_UNTYPED = "UntypedStorage"
_QUANTIZED = ("qint", "quint")
_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor_v2": Function("_rebuild_tensor_v2", lambda _, arguments: _rebuild_v2(*arguments)),
    "torch._utils._rebuild_tensor_v3": Function("_rebuild_tensor_v3", lambda _, arguments: _rebuild_v3(*arguments)),
    "torch.storage.UntypedStorage": _UNTYPED,
    "collections.OrderedDict": Function("OrderedDict", lambda _, arguments: _no_hooks(*arguments)),
    **{f"torch.{cls}": getattr(torch, name) for name, cls in TYPED_STORAGES.items() if not name.startswith(_QUANTIZED)},
    **{f"torch.{name}": dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
}
_TABLE = PickleTable(find=_NAMES.__getitem__)


def _storage(pid: Any) -> _Storage:
    kind, storage, key, _, _ = pid
    if kind != "storage" or type(key) is not str:
        raise ValueError("a persistent id is not a storage")
    return _Storage(storage if isinstance(storage, torch.dtype) else None, key)
