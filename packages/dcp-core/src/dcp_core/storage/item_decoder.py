"""Decoding stored items: from the bytes of an item, whatever its kind, to the values that were saved.

Bare values, also those in an ordinary archive, and blocks that are decoded one by one can be read in parts. All other
items are read and decoded whole. The destinations of the values are chosen in `read_requests`.
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
    """An item of which any range of the values can be read."""

    item: StoredItem
    decoder: BlockDecoder | None = None
    """Decoder of the item's blocks, if it has any."""
    dtype: torch.dtype | None = None
    """Dtype of the values, if the item itself names it: it may differ from the index."""


class ItemDecoder:
    """Decodes stored items of every kind. Thread-safe once `look_into` is done.

    Args:
        registry: Registry of the transforms.
    """

    def __init__(self, registry: ExtensionRegistry) -> None:
        self._registry = registry
        self._search = ArchiveSearch()

    def look_into(self, items: Iterable[tuple[str, StoredItem]], read: Callable[[list[ReadRequest]], ReadStats]) -> int:
        """Find the values in large archives, so that those of ordinary archives can be read in parts.

        Args:
            items: Pairs of key and stored item.
            read: Function that executes read requests.

        Returns:
            The number of bytes that were read for this search.
        """
        for key, item in items:
            self._search.add(key, item)
        return read(self._search.requests).bytes_read if self._search.requests else 0

    def in_parts(self, key: str, item: StoredItem, sizes: tuple[int, ...]) -> PartialItem | None:
        """Return the item to read parts of a tensor from; None if it must be read whole, and decoded by `tensor`.

        Args:
            key: FQN of the tensor, for error messages.
            item: Stored item of the tensor.
            sizes: Sizes of the stored tensor, as in the index.

        Raises:
            UnsupportedFormatError: A transform of the item's blocks is not known.
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
        """Return the tensor that is stored in all bytes of an item.

        Args:
            key: FQN of the tensor, for error messages.
            item: Stored item of the tensor.
            data: Bytes of the item, already verified.
            dtype: Dtype of the stored values, as in the index. None if this torch lacks the dtype: bare values then
                remain bytes.
            sizes: Sizes of the stored tensor, as in the index.

        Raises:
            CorruptCheckpointError: The bytes contain another value; the message names file, key and offset.
            UnsupportedFormatError: A transform is not known.
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
        """Return the bytes of `dump_object` from all bytes of an object's item; raises as `tensor` does."""
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
