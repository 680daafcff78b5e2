"""Consistency check of an index, before it is written and after it was read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.box_columns import BoxLayout, distinct, starts
from dcp_manifest.index.columns import BlockColumns, CheckpointIndex, ItemColumns, ManifestInfo, TensorFlags
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.items import ENCODED_BLOCK_MAX_BYTES, Framing, ItemKind

__all__ = ["MAX_NDIM", "MAX_NUMBERS_PER_BYTE", "check_index", "derived_bytes"]

MAX_NDIM = 64
MAX_NUMBERS_PER_BYTE = 16
"""Limit of the length of a column: numbers per byte of the manifest. It bounds the memory for a hostile manifest."""
_MAX_POSITION = 1 << 62


def check_index(index: CheckpointIndex) -> None:
    """Check that the columns of an index are consistent, and that every number in them is valid.

    After the check, each non-empty chunk is inside its tensor, all references between tables are valid, names are
    unique, stored ranges are inside their items, and raw items have the size that follows from dtype and sizes. Not
    checked: whether the chunks cover their tensor, and whether files exist.

    Raises:
        ValueError: The index is inconsistent; the message is a sentence about the first problem.
    """
    if index.info is not None:
        _check_info(index.info)
    _check_tensors(index)
    _check_boxes(index)
    _check_names(index)
    if index.chunk_items is not None:
        _check_items(index, index.chunk_items, "chunk", int(index.tensor_chunks.sum()))
        _require(not (index.chunk_items.framing == Framing.OBJECT).any(), "a chunk of a tensor is stored as an object")
        wanted = derived_bytes(index)
        _check_raw_bytes(index, index.chunk_items, wanted)
        if index.chunk_items.blocks is not None:
            _check_blocks(index.chunk_items, index.chunk_items.blocks, wanted)
    if index.object_items is not None:
        _require(index.object_items.blocks is None, "an object is encoded in blocks")
        _check_items(index, index.object_items, "object", len(index.object_names))
        if (index.object_items.framing == Framing.RAW).any():
            raise ValueError("an object is stored as raw elements")


def derived_bytes(index: CheckpointIndex) -> npt.NDArray[np.int64]:
    """Return the decoded size of each chunk in bytes; -1 for a chunk of an unknown dtype.

    Raises:
        ValueError: A chunk has more bytes than any machine's memory.
    """
    item_bytes = np.array([ITEM_BYTES.get(dtype, -1) for dtype in index.dtypes] or [0], np.int64)
    per_chunk = np.repeat(item_bytes[index.tensor_dtype], index.tensor_chunks)
    layout = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks))
    volumes = layout.volumes(index.chunk_sizes)
    if len(volumes) and int(volumes.max()) > _MAX_POSITION // 16:
        raise ValueError("a chunk has more bytes than any memory")
    known: npt.NDArray[np.int64] = np.where(per_chunk > 0, volumes * per_chunk, -1)
    return known


def _require(fact: bool | np.bool_, sentence: str) -> None:
    if not fact:
        raise ValueError(sentence)


def _check_info(info: ManifestInfo) -> None:
    _require(info.world_size >= 1, f"a save by {info.world_size} ranks")
    _require(info.rank is None or 0 <= info.rank < info.world_size, f"rank {info.rank} of {info.world_size}")
    _require(info.generation >= 0, f"the generation {info.generation}")


def _check_tensors(index: CheckpointIndex) -> None:
    count = len(index.tensor_names)
    columns = (index.tensor_dtype, index.tensor_flags, index.tensor_ndim, index.tensor_owner, index.tensor_chunks)
    _require(all(len(column) == count for column in columns), f"a tensor column does not have {count} rows")
    _require(not count or int(index.tensor_ndim.max()) <= MAX_NDIM, f"a tensor has more than {MAX_NDIM} dimensions")
    _require(len(index.tensor_shape) == int(index.tensor_ndim.sum()), "shapes do not fit the tensors' dimensions")
    _require(not count or int(index.tensor_chunks.min()) >= 0, "a tensor has a negative number of chunks")
    _require(not (index.tensor_shape < 0).any(), "a tensor has a negative size")
    _require(not count or int(index.tensor_dtype.max()) < len(index.dtypes), "a tensor's dtype is not in the table")
    for bits in distinct(index.tensor_flags).tolist():
        TensorFlags.from_bits(bits)


def _check_boxes(index: CheckpointIndex) -> None:
    layout = BoxLayout(np.repeat(index.tensor_ndim, index.tensor_chunks))
    offsets, sizes = index.chunk_offsets, index.chunk_sizes
    _require(len(offsets) == len(sizes) == layout.numbers, "the chunks' boxes do not fit the tensors' dimensions")
    _require(not (offsets < 0).any() and not (sizes < 0).any(), "a chunk has a negative offset or size")
    outside = np.zeros(layout.boxes, np.bool_)
    empty = np.zeros(layout.boxes, np.bool_)
    shapes = starts(index.tensor_ndim)
    for dim in range(layout.dims):
        rows, places = layout.rows(dim), layout.places(dim)
        deep = index.tensor_ndim > dim
        limits = np.repeat(index.tensor_shape[shapes[:-1][deep] + dim], index.tensor_chunks[deep])
        # Subtraction cannot overflow, addition could.
        outside[rows] |= sizes[places] > limits - offsets[places]
        empty[rows] |= sizes[places] == 0
    # Empty shards are recorded at or beyond the end of the tensor, depending on the writer.
    bad = outside & ~empty
    if bad.any():
        tensor = int(np.searchsorted(starts(index.tensor_chunks), int(np.argmax(bad)), "right")) - 1
        raise ValueError(f"a chunk of {index.tensor_names[tensor]!r} reaches beyond the tensor")


def _check_names(index: CheckpointIndex) -> None:
    _require(len(index.object_owner) == len(index.object_names), "the objects' owners do not match their names")
    _require(len(index.alias_targets) == len(index.alias_names), "the aliases' targets do not match their names")
    if len(index.alias_targets) and int(index.alias_targets.max()) >= len(index.tensor_names):
        raise ValueError("an alias names a tensor that is not in the table")
    if not index.tensor_owner.any() and not index.object_owner.any():
        names: list[object] = [*index.tensor_names, *index.object_names]
    else:
        names = [
            *zip(index.tensor_names, index.tensor_owner.tolist(), strict=True),
            *zip(index.object_names, index.object_owner.tolist(), strict=True),
        ]
    _require(len(set(names)) == len(names), "two values have the same name")
    plain = {*index.tensor_names, *index.object_names} if index.alias_names else set()
    _require(len(set(index.alias_names)) == len(index.alias_names), "two aliases have the same name")
    _require(plain.isdisjoint(index.alias_names), "an alias has the name of a value")


def _check_items(index: CheckpointIndex, items: ItemColumns, what: str, count: int) -> None:
    columns = (items.file, items.offset, items.length, items.lead, items.stored_bytes, items.framing, items.chain)
    fits = all(len(column) == count for column in (*columns, items.checked, items.crc32))
    _require(fits, f"a column of {what} items does not have {count} rows")
    if count == 0:
        _require(len(items.running_crcs) == 0, f"there are running CRCs that belong to no {what}")
        return
    _require(int(items.file.max()) < len(index.files), f"the file of a {what} is not in the table")
    _require(int(items.chain.max()) <= len(index.chains), f"the transforms of a {what} are not in the table")
    _require(int(items.framing.max()) <= max(Framing), f"the framing of a {what} is not known")
    _require(int(items.checked.max()) <= 1, f"a {what} is marked neither as checked nor as unchecked")
    numbers = (items.offset, items.length, items.stored_bytes)
    _require(
        all(int(column.max()) < _MAX_POSITION for column in numbers), f"the offset of a {what} is larger than any file"
    )
    fits = bool((items.lead + items.stored_bytes <= items.length).all())
    _require(fits, f"the stored range of a {what} reaches beyond its item")
    if items.blocks is not None:
        counts, sizes = items.blocks.counts, items.blocks.block_bytes
        _require(len(counts) == len(sizes) == count, f"a column of encoded {what}s does not have {count} rows")
    running = int(items.running_counts().sum())
    _require(
        len(items.running_crcs) == running, f"the {what}s have {len(items.running_crcs)} running CRCs, not {running}"
    )


def _check_blocks(items: ItemColumns, blocks: BlockColumns, decoded: npt.NDArray[np.int64]) -> None:
    encoded = blocks.counts > 0
    total = int(blocks.counts.sum(dtype=np.int64))
    _require(len(blocks.lengths) == len(blocks.crcs) == total, f"the number of encoded blocks is not {total}")
    _require(bool(((blocks.block_bytes > 0) == encoded).all()), "a chunk without encoded blocks has a block size")
    plain = (items.framing != Framing.RAW) | (items.chain == 0) | (items.checked == 0)
    _require(not (encoded & plain).any(), "a chunk in encoded blocks has no transform, no CRC or a frame")
    sizes = blocks.block_bytes.astype(np.int64)
    _require(not len(sizes) or int(sizes.max()) <= ENCODED_BLOCK_MAX_BYTES, "a block is too long once decoded")
    known = encoded & (decoded >= 0)
    counts = -(-decoded[known] // sizes[known])
    _require(
        bool((counts == blocks.counts[known]).all()), "a chunk's encoded blocks do not add up to its dtype and sizes"
    )
    ends = starts(blocks.lengths)[blocks.starts()]
    fits = np.diff(ends)[encoded] == items.stored_bytes.astype(np.int64)[encoded]
    _require(bool(fits.all()), "a chunk's encoded blocks do not fill its stored range")


def _check_raw_bytes(index: CheckpointIndex, items: ItemColumns, wanted: npt.NDArray[np.int64]) -> None:
    bad = (items.kinds() == ItemKind.RAW) & (wanted >= 0) & (items.stored_bytes.astype(np.int64) != wanted)
    if bad.any():
        row = int(np.argmax(bad))
        tensor = int(np.searchsorted(starts(index.tensor_chunks), row, "right")) - 1
        raise ValueError(
            f"a chunk of {index.tensor_names[tensor]!r} has {items.stored_bytes[row]} bytes; its dtype and sizes "
            f"need {wanted[row]}"
        )
