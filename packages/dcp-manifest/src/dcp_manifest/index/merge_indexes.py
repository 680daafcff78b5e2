"""Merging of one checkpoint's rank-local indexes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, distinct, ranges, starts
from dcp_manifest.index.stored_items import join_items
from dcp_manifest.types import I64

Key = TypeVar("Key")


def merge_rank_indexes(indexes: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Merge the indexes of all ranks, in rank order; `info` is the first's, with `rank=None`.

    Either all indexes have items, or none. Of equal boxes of a tensor, and of objects or aliases of the same name, the
    first rank's is used. Coverage is not checked. Raises CorruptCheckpointError if ranks disagree on a tensor's dtype,
    flags or shape.
    """
    dtypes = _table(part.dtypes for part in indexes)
    files = _table(part.files for part in indexes)
    chains = _table(part.chains for part in indexes)
    merged = CheckpointIndex(dtypes=tuple(dtypes), files=tuple(files), chains=tuple(chains))
    info = indexes[0].info
    merged.info = None if info is None else replace(info, rank=None)
    if any(part.paths is not None for part in indexes):
        merged.paths = {name: path for part in reversed(indexes) for name, path in (part.paths or {}).items()}
    clashing = _clashing_aliases(indexes)
    expanded = [_with_aliases_as_tensors(part, clashing) for part in indexes]
    rows = _merge_tensors(merged, expanded, dtypes)
    _merge_chunks(merged, expanded, rows, files, chains)
    _merge_objects(merged, expanded, files, chains)
    _merge_aliases(merged, expanded, rows)
    return merged


def _table(tables: Iterable[Sequence[Key]]) -> dict[Key, int]:
    values = dict.fromkeys(value for table in tables for value in table)
    return dict(zip(values, range(len(values)), strict=True))


def _clashing_aliases(indexes: Sequence[CheckpointIndex]) -> set[str]:
    """Return aliases that another index uses differently."""
    targets: dict[str, set[str]] = {}
    for part in indexes:
        for name, row in zip(part.alias_names, part.alias_targets.tolist(), strict=True):
            targets.setdefault(name, set()).add(part.tensor_names[row])
    tensors = {name for part in indexes for name in part.tensor_names} if targets else set()
    return {name for name, found in targets.items() if name in tensors or len(found) > 1}


def _with_aliases_as_tensors(part: CheckpointIndex, names: Collection[str]) -> CheckpointIndex:
    made = [row for row, name in enumerate(part.alias_names) if name in names]
    if not made:
        return part
    rows = np.concatenate([np.arange(len(part.tensor_names)), part.alias_targets[made].astype(np.int64)])
    picked = take_tensors(part, rows)
    picked.tensor_names = [*part.tensor_names, *(part.alias_names[row] for row in made)]
    kept = [row for row, name in enumerate(part.alias_names) if name not in names]
    picked.alias_names = [part.alias_names[row] for row in kept]
    picked.alias_targets = part.alias_targets[kept]
    return picked


def take_tensors(part: CheckpointIndex, rows: I64) -> CheckpointIndex:
    """Return an index with the tensors in these rows, in order."""
    shapes, boxes, chunks = part.shape_starts(), part.box_starts(), part.chunk_starts()
    chunk_rows = ranges(chunks[:-1][rows], chunks[1:][rows])
    return replace(
        part,
        tensor_dtype=part.tensor_dtype[rows],
        tensor_flags=part.tensor_flags[rows],
        tensor_ndim=part.tensor_ndim[rows],
        tensor_owner=part.tensor_owner[rows],
        tensor_shape=part.tensor_shape[ranges(shapes[:-1][rows], shapes[1:][rows])],
        tensor_chunks=part.tensor_chunks[rows],
        chunk_offsets=part.chunk_offsets[ranges(boxes[:-1][rows], boxes[1:][rows])],
        chunk_sizes=part.chunk_sizes[ranges(boxes[:-1][rows], boxes[1:][rows])],
        chunk_items=None if part.chunk_items is None else join_items([part.chunk_items], chunk_rows),
    )


def _merge_tensors(merged: CheckpointIndex, parts: Sequence[CheckpointIndex], dtypes: dict[str, int]) -> list[I64]:
    facts: dict[tuple[str, int], tuple[int, int, tuple[int, ...]]] = {}
    order: dict[tuple[str, int], int] = {}
    rows: list[I64] = []
    for part in parts:
        kinds = [dtypes[name] for name in part.dtypes]
        shapes, ends = part.tensor_shape.tolist(), part.shape_starts().tolist()
        columns = zip(part.tensor_dtype.tolist(), part.tensor_flags.tolist(), ends[:-1], ends[1:], strict=True)
        keys = list(zip(part.tensor_names, part.tensor_owner.tolist(), strict=True))
        for key, (dtype, flags, start, end) in zip(keys, columns, strict=True):
            found = (kinds[dtype], flags, tuple(shapes[start:end]))
            known = facts.setdefault(key, found)
            if (known[0], known[2]) != (found[0], found[2]):
                raise CorruptCheckpointError(
                    f"ranks disagree on the dtype or shape of a tensor: {merged.dtypes[known[0]]} {known[2]} and "
                    f"{merged.dtypes[found[0]]} {found[2]}",
                    key=key[0],
                )
            order.setdefault(key, len(order))
        rows.append(np.array([order[key] for key in keys], np.int64))
    merged.tensor_names = [name for name, _ in facts]
    merged.tensor_owner = np.array([owner for _, owner in facts], np.uint32)
    merged.tensor_dtype = np.array([dtype for dtype, _, _ in facts.values()], np.uint8)
    merged.tensor_flags = np.array([flags for _, flags, _ in facts.values()], np.uint8)
    merged.tensor_ndim = np.array([len(shape) for _, _, shape in facts.values()], np.uint8)
    merged.tensor_shape = np.array([size for _, _, shape in facts.values() for size in shape], np.int64)
    return rows


def _merge_chunks(
    merged: CheckpointIndex,
    parts: Sequence[CheckpointIndex],
    rows: Sequence[I64],
    files: dict[str, int],
    chains: dict[tuple[str, ...], int],
) -> None:
    tensor = np.concatenate([np.repeat(row, part.tensor_chunks) for row, part in zip(rows, parts, strict=True)])
    ndim = merged.tensor_ndim[tensor]
    offsets = np.concatenate([part.chunk_offsets for part in parts])
    sizes = np.concatenate([part.chunk_sizes for part in parts])
    kept = _first_of_equal(tensor, ndim, offsets, sizes)
    kept = kept[np.argsort(tensor[kept], kind="stable")]
    merged.tensor_chunks = np.bincount(tensor[kept], minlength=len(merged.tensor_names)).astype(np.int64)
    ends = starts(ndim)
    numbers = ranges(ends[:-1][kept], ends[1:][kept])
    merged.chunk_offsets, merged.chunk_sizes = offsets[numbers], sizes[numbers]
    items = [_renumbered(part.chunk_items, part, files, chains) for part in parts if part.chunk_items is not None]
    merged.chunk_items = join_items(items, kept) if items else None


def _first_of_equal(tensor: I64, ndim: npt.NDArray[np.uint8], offsets: I64, sizes: I64) -> I64:
    ends = starts(ndim)
    kept = []
    for dims in distinct(ndim).tolist():
        rows = np.flatnonzero(ndim == dims)
        places = ends[:-1][rows][:, None] + np.arange(dims)
        boxes = np.concatenate([tensor[rows][:, None], offsets[places], sizes[places]], axis=1)
        _, first = np.unique(boxes, axis=0, return_index=True)
        kept.append(rows[first])
    found: I64 = np.sort(np.concatenate(kept)) if kept else np.zeros(0, np.int64)
    return found


def _merge_objects(
    merged: CheckpointIndex,
    parts: Sequence[CheckpointIndex],
    files: dict[str, int],
    chains: dict[tuple[str, ...], int],
) -> None:
    rows: dict[tuple[str, int], int] = {}
    total = 0
    for part in parts:
        for row, key in enumerate(zip(part.object_names, part.object_owner.tolist(), strict=True)):
            rows.setdefault(key, total + row)
        total += len(part.object_names)
    merged.object_names = [name for name, _ in rows]
    merged.object_owner = np.array([owner for _, owner in rows], np.uint32)
    items = [_renumbered(part.object_items, part, files, chains) for part in parts if part.object_items is not None]
    merged.object_items = join_items(items, np.array(list(rows.values()), np.int64)) if items else None


def _merge_aliases(merged: CheckpointIndex, parts: Sequence[CheckpointIndex], rows: Sequence[I64]) -> None:
    targets: dict[str, int] = {}
    for part, of_part in zip(parts, rows, strict=True):
        for name, target in zip(part.alias_names, part.alias_targets.tolist(), strict=True):
            targets.setdefault(name, int(of_part[target]))
    merged.alias_names = list(targets)
    merged.alias_targets = np.array(list(targets.values()), np.uint32)


def _renumbered(
    items: ItemColumns, part: CheckpointIndex, files: dict[str, int], chains: dict[tuple[str, ...], int]
) -> ItemColumns:
    file_rows = np.array([files[name] for name in part.files], np.uint32)
    chain_rows = np.array([0, *(chains[chain] + 1 for chain in part.chains)], np.uint8)
    return replace(items, file=file_rows[items.file], chain=chain_rows[items.chain])
