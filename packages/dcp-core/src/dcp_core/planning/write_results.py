"""Compact form of a rank's write results for the coordinator: CRCs, and file locations only if they have changed.

With a cached plan and unchanged locations, the results take 4 bytes for each chunk and for each block with a checksum.
Items that are encoded in blocks have new locations in each save, and take 8 bytes more for each block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcp_core.records.lazy import LazyList
from dcp_core.records.protocols import WriteResult
from dcp_core.tables.plan_columns import WrittenColumns
from dcp_core.tables.planned_rows import PlannedRows
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest.index.columns import BlockColumns, ItemColumns
from dcp_manifest.index.stored_items import StoredItems, take_items

__all__ = ["KEPT_LAYOUTS", "PackedResults", "pack", "unpack"]

_PLACES = ("file", "offset", "length", "lead", "stored_bytes", "framing", "chain", "checked")
KEPT_LAYOUTS = 4
"""Number of sets of file locations that the coordinator caches for each rank."""
_NONE = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class PackedResults:
    """Compact write results of one rank. Locations of objects are always included, because objects change in size.

    Attributes:
        files: Names of the data files.
        chains: Chains of transform descriptors to which the columns refer.
        crc32: CRC of each chunk of a tensor.
        running_crcs: CRCs at the block borders of the chunks, concatenated.
        blocks: Encoded blocks of the chunks; None if no chunk is encoded in blocks.
        objects: Locations and CRCs of the objects.
    """

    files: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    crc32: npt.NDArray[np.uint32]
    running_crcs: npt.NDArray[np.uint32]
    blocks: BlockColumns | None
    objects: ItemColumns
    layout: bytes
    """Digest of the locations of the rank's tensors in files."""
    places: ItemColumns | None
    """Locations of the tensors in files, without CRCs; None if the coordinator has cached them under the digest."""


def pack(stored: StoredItems, tensors: int, known_layout: bytes) -> PackedResults:
    """Return the write results of a rank in compact form.

    Args:
        stored: Locations and CRCs of the rank's items: chunks of tensors, then objects.
        tensors: Number of items in `stored` that are chunks of tensors.
        known_layout: Digest of the locations that the coordinator has cached; empty if it has cached none.
    """
    columns = stored.columns
    first = take_items([columns], np.arange(tensors))
    layout = hashlib.blake2b(repr((len(stored.files), stored.chains)).encode(), digest_size=16)
    for name in _PLACES:
        layout.update(np.ascontiguousarray(getattr(first, name)).data)
    digest = layout.digest()
    return PackedResults(
        stored.files,
        stored.chains,
        first.crc32,
        first.running_crcs,
        first.blocks,
        take_items([columns], np.arange(tensors, len(stored))),
        digest,
        None if digest == known_layout else replace(_narrow(first), crc32=_NONE, running_crcs=_NONE, blocks=None),
    )


def unpack(
    packed: PackedResults, planned: PlannedRows | None, known: RecentlyUsed[bytes, ItemColumns]
) -> list[WriteResult]:
    """Return the write results of a rank from their compact form. Called on the coordinator.

    Args:
        packed: Compact results of the rank.
        planned: Items that the plan assigned to the rank.
        known: Cache of the rank's file locations in earlier saves, by digest; locations in `packed` are added.
    """
    places = known.get(packed.layout) if packed.places is None else packed.places
    if places is None or planned is None:
        raise RuntimeError("a rank did not say where its items lie")
    known.put(packed.layout, places)
    tensors = replace(places, crc32=packed.crc32, running_crcs=packed.running_crcs, blocks=packed.blocks)
    joined = take_items([tensors, packed.objects], np.arange(len(tensors) + len(packed.objects)))
    return LazyList(WrittenColumns(planned, StoredItems(joined, packed.files, packed.chains)))


def _narrow(columns: ItemColumns) -> ItemColumns:
    """Convert numbers to fewer bytes, where they are small."""
    changes = {}
    for name in ("offset", "length", "stored_bytes", "file", "lead"):
        numbers = getattr(columns, name)
        dtype = np.min_scalar_type(int(numbers.max())) if len(numbers) else numbers.dtype
        changes[name] = numbers.astype(dtype)
    return replace(columns, **changes)
