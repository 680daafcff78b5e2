"""Decoding of stored items into tensors and bytes of objects.

Of tensors stored as plain bytes (also inside an ordinary zip archive) or in encoded blocks, any range can be read. All
other items are read and decoded as a whole. The tensors to fill are chosen in `read_requests`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from dcp_core.encoding.block_transforms import block_undo
from dcp_core.encoding.transforms import ExtensionRegistry, undo
from dcp_core.errors import CorruptCheckpointError
from dcp_core.objects.object_bytes import load_tensor
from dcp_core.storage.stock_archive import ArchiveSearch
from dcp_io.requests import BlockDecoder, ReadRequest, ReadStats
from dcp_manifest.index.items import Framing, ItemKind, StoredItem

__all__ = ["ItemDecoder", "PartialItem"]

# Limit of the decoded size: elements of the largest dtype and the framing of an archive around them
# (a planner may have stored another dtype than the index says); for objects the size is unknown.
_MAX_ITEM_BYTES = 16
_MAX_ARCHIVE_BYTES = 1 << 20
_MAX_OBJECT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class PartialItem:
    """A stored tensor item of which any range of elements can be read."""

    item: StoredItem
    decoder: BlockDecoder | None = None
    """Decoder of the item's encoded blocks; None if the item is stored as plain bytes."""
    dtype: torch.dtype | None = None
    """Dtype of the elements as recorded in the item itself, which may differ from the index; None if not recorded."""


class ItemDecoder:
    """Decoder of stored items of every kind. Thread-safe after `look_into` has returned.

    Args:
        registry: Registry of the transforms.
    """

    def __init__(self, registry: ExtensionRegistry) -> None:
        self._registry = registry
        self._search = ArchiveSearch()

    def look_into(self, items: Iterable[tuple[str, StoredItem]], read: Callable[[list[ReadRequest]], ReadStats]) -> int:
        """Locate the tensors' bytes in large zip archives, so that ranges of them can be read.

        Args:
            items: Pairs (FQN, record of the stored item).
            read: Function that executes read requests.

        Returns:
            Number of bytes that were read to locate them.
        """
        for key, item in items:
            self._search.add(key, item)
        return read(self._search.requests).bytes_read if self._search.requests else 0

    def in_parts(self, key: str, item: StoredItem, sizes: tuple[int, ...]) -> PartialItem | None:
        """Return a tensor's item for reading ranges of it; None if the item must be read whole and decoded by `tensor`.

        Args:
            key: FQN of the tensor, for error messages.
            item: Record of the stored item.
            sizes: Sizes of the stored chunk, as in the index.

        Raises:
            UnsupportedFormatError: A transform of the item's blocks is not installed.
        """
        kind = item.kind
        if kind is ItemKind.RAW:
            return PartialItem(item)
        if kind is ItemKind.BLOCKS:
            return PartialItem(item, block_undo(item, key, self._registry))
        found = self._search.found.get((item.file, item.offset)) if kind is ItemKind.ARCHIVE else None
        return PartialItem(found.item, None, found.dtype) if found is not None and found.sizes == sizes else None

    def tensor(
        self, key: str, item: StoredItem, data: memoryview, dtype: torch.dtype | None, sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the tensor that is decoded from all bytes of an item.

        Args:
            key: FQN of the tensor, for error messages.
            item: Record of the stored item.
            data: All bytes of the item, whose CRCs have been checked.
            dtype: Dtype of the stored elements, as in the index; None if this torch version does not have the dtype, in
                which case plain bytes are returned as a uint8 tensor.
            sizes: Sizes of the stored chunk, as in the index.

        Raises:
            CorruptCheckpointError: The bytes do not contain this tensor; the message names file, key and offset.
            UnsupportedFormatError: A transform is not installed.
        """
        elements = math.prod(sizes)
        if item.kind is ItemKind.STREAM:
            data = undo(data, item, key, self._registry, elements * _MAX_ITEM_BYTES + _MAX_ARCHIVE_BYTES)
        if item.framing is not Framing.RAW:
            return _archived(key, item, data, sizes)
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
        if dtype is None:
            return flat
        if len(data) != elements * dtype.itemsize:
            what = f"has {len(data)} bytes once it is decoded, not {elements * dtype.itemsize}"
            raise _damage(key, item, f"the stored tensor {what}")
        return flat.view(dtype).view(sizes)

    def object(self, key: str, item: StoredItem, data: memoryview) -> memoryview:
        """Return the serialized object, as from `dump_object`, from all bytes of its item; raises like `tensor`."""
        return undo(data, item, key, self._registry, _MAX_OBJECT_BYTES) if item.kind is ItemKind.STREAM else data


def _archived(key: str, item: StoredItem, data: memoryview, sizes: tuple[int, ...]) -> torch.Tensor:
    try:
        tensor = load_tensor(data)
    except Exception as error:
        raise _damage(key, item, f"the stored tensor cannot be read: {error}") from error
    if tuple(tensor.shape) != sizes:
        raise _damage(key, item, f"the stored tensor has sizes {tuple(tensor.shape)}, not {sizes} as indexed")
    return tensor


def _damage(key: str, item: StoredItem, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(what, file=item.file, key=key, offset=item.offset)
