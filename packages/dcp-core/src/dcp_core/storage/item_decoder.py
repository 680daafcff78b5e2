"""Decode stored items to tensors and object bytes.

Encoded blocks and plain bytes, also in an ordinary zip archive, can be read in ranges. A tensor in a large archive is
located from the archive's first and last bytes, if it is the only storage, uncompressed, dense and row-major.

Source: torch 2.13 `torch.serialization._save`, `torch._utils._rebuild_tensor_v2` and `_v3`.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dcp_core.encoding.compression import ExtensionRegistry, block_undo, undo
from dcp_core.errors import CorruptCheckpointError, UnsafeCheckpointError, UnsupportedValueError
from dcp_core.objects.object_bytes import load_tensor
from dcp_core.tensors.kinds import unwrapped
from dcp_io.archives.archive_checks import inflated, zip_records
from dcp_io.requests import BlockDecoder, ReadRequest, ReadStats
from dcp_manifest.index.columns import Framing, ItemKind, StoredItem
from dcp_manifest.index.dtypes import TYPED_STORAGES
from dcp_manifest.index.runs import Runs
from dcp_manifest.pickles.pickle_table import Function, PickleTable
from dcp_manifest.pickles.safe_pickle import read_pickle

# Limit of the decoded size: elements of the largest dtype (a planner may store another dtype than the index says) and
# the archive around them. The size of objects is unknown.
_MAX_ITEM_BYTES = 16
_MAX_ARCHIVE_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PartialItem:
    """A stored tensor that can be read in ranges."""

    item: StoredItem
    decoder: BlockDecoder | None = None
    dtype: torch.dtype | None = None
    """The item's dtype, which may differ from the index."""


class ItemDecoder:
    """Decodes stored items. Thread-safe after `look_into` returned."""

    def __init__(
        self, registry: ExtensionRegistry, *, allow_globals: Sequence[Any] = (), trust_objects: bool = False
    ) -> None:
        self._registry = registry
        self._allowed = partial(load_tensor, allow_globals=allow_globals, trust_objects=trust_objects)
        self._located: dict[tuple[str, int], ArchivedTensor] = {}

    def look_into(self, items: Iterable[tuple[str, StoredItem]], read: Callable[[list[ReadRequest]], ReadStats]) -> int:
        """Locate tensors inside large zip archives; return the bytes read."""
        search = ArchiveSearch()
        for key, item in items:
            search.add(key, item)
        self._located = search.found
        return read(search.requests).bytes_read if search.requests else 0

    def in_parts(self, key: str, item: StoredItem, sizes: tuple[int, ...]) -> PartialItem | None:
        """Return an item for reading ranges; None to decode it whole."""
        kind = item.kind
        if kind is ItemKind.RAW:
            return PartialItem(item)
        if kind is ItemKind.BLOCKS:
            return PartialItem(item, block_undo(item, key, self._registry))
        found = self._located.get((item.file, item.offset)) if kind is ItemKind.ARCHIVE else None
        return PartialItem(found.item, None, found.dtype) if found is not None and found.sizes == sizes else None

    def tensor(
        self, key: str, item: StoredItem, data: memoryview, dtype: torch.dtype | None, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Decode bytes with verified CRCs; dtype None returns plain bytes as uint8.

        CorruptCheckpointError: the bytes do not contain this tensor. UnsafeCheckpointError: its class is not allowed.
        """
        elements = math.prod(sizes)
        if item.kind is ItemKind.STREAM:
            data = undo(data, item, key, self._registry, elements * _MAX_ITEM_BYTES + _MAX_ARCHIVE_BYTES)
        if item.framing is not Framing.RAW:
            return self._archived(key, item, data, sizes)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        if dtype is None:
            return flat
        if len(data) != elements * dtype.itemsize:
            what = f"has {len(data)} bytes once it is decoded, not {elements * dtype.itemsize}"
            raise _damage(key, item, f"the stored tensor {what}")
        return flat.view(dtype).view(sizes)

    def _archived(self, key: str, item: StoredItem, data: memoryview, sizes: tuple[int, ...]) -> torch.Tensor:
        try:
            tensor = unwrapped(self._allowed(data, key=key))
        except (UnsafeCheckpointError, UnsupportedValueError):
            raise
        except Exception as error:
            raise _damage(key, item, f"the stored tensor cannot be read: {error}") from error
        if tuple(tensor.shape) != sizes:
            raise _damage(key, item, f"the stored tensor has sizes {tuple(tensor.shape)}, not {sizes} as indexed")
        return tensor

    def object(self, key: str, item: StoredItem, data: memoryview) -> memoryview:
        """Decode an object's bytes."""
        return undo(data, item, key, self._registry, _MAX_OBJECT_BYTES) if item.kind is ItemKind.STREAM else data


def _damage(key: str, item: StoredItem, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(what, file=item.file, key=key, offset=item.offset)


# Smaller archives are read whole, in one read instead of two.
_SEARCH_MIN_BYTES = 1 << 20
# Bytes that each rank reads at each end; less than 1 KiB precedes or follows the elements.
_END_BYTES = 2 << 10
_MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """An uncompressed tensor in a zip archive."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    item: StoredItem
    """The elements, with the CRC of the archive's record."""


class ArchiveSearch:
    """Locates tensors in archives: call `add` per archive, execute `requests`, then use `found`."""

    def __init__(self) -> None:
        self.requests: list[ReadRequest] = []
        self._places: set[tuple[str, int]] = set()
        self.found: dict[tuple[str, int], ArchivedTensor] = {}
        """(File, byte offset) of an archive → its tensor."""

    def add(self, key: str, stored: StoredItem) -> None:
        """Add an archive unless it is small or known."""
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

        # Read bare bytes: parts of an archive have no CRC. The parts in use are verified later.
        bare = replace(stored, framing=Framing.RAW)
        runs = Runs(0, _END_BYTES, (2,), (size - _END_BYTES,))
        self.requests.append(ReadRequest(key, bare, 0, size, None, locate, take, runs))


def locate_tensor(stored: StoredItem, head: bytes, tail: bytes) -> ArchivedTensor | None:
    """Locate the elements; None if the archive is not ordinary."""
    try:
        return _locate(stored, head, tail)
    except Exception:  # noqa: BLE001 - any error means that the archive is not ordinary
        return None


def _locate(stored: StoredItem, head: bytes, tail: bytes) -> ArchivedTensor | None:
    whole = memoryview(mmap.mmap(-1, stored.stored_bytes))  # what is between the ends takes no memory
    whole[: len(head)], whole[-len(tail) :] = head, tail
    listed = zip_records(whole)
    records = {record.name.partition("/")[2]: record for record in listed}
    (values,) = (name for name in records if name.startswith("data/"))
    record = records[values]
    if any(other.stored_bytes > len(head) for other in listed if other is not record):
        return None  # not within an end
    tensor, _ = read_pickle(inflated(whole, records["data.pkl"]), _TABLE, persistent=_storage)
    little = "byteorder" not in records or inflated(whole, records["byteorder"]) == b"little"
    checked = any(one.crc32 for one in listed if one.bytes)
    ordinary = little and len(records) == len(listed) and not record.deflated
    if not ordinary or not isinstance(tensor, _Rebuilt) or not tensor.is_ordinary():
        return None
    size = math.prod(tensor.sizes) * tensor.dtype.itemsize
    if values != f"data/{tensor.storage.key}" or record.bytes != size:
        return None
    item = StoredItem(
        file=stored.file,
        offset=stored.offset + stored.lead + record.start,
        length=size,
        lead=0,
        stored_bytes=size,
        framing=Framing.RAW,
        crc32=record.crc32 if checked else None,
    )
    return ArchivedTensor(tensor.dtype, tensor.sizes, item)


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: torch.dtype | None
    key: str


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    storage: _Storage
    dtype: torch.dtype
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    plain: bool

    def is_ordinary(self) -> bool:
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
