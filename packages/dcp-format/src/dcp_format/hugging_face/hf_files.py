"""Safetensors files that one rank writes in a save: their names, and writing them.

Source: torch 2.13 `torch.distributed.checkpoint.{hf_storage,_hf_utils}` (names of files, `DCP_SHARDING_INFO`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_core import SavePlanner, WriteItem, WriteResult
from dcp_format.export.box_writes import cast_pieces
from dcp_format.export.file_map import form_of, tensor_data_of
from dcp_format.safetensors.complete_set import SUFFIX
from dcp_format.safetensors.safetensors_header import build_header
from dcp_format.safetensors.safetensors_index import SHAPES, SHARDING, shard_name
from dcp_io import Store

Groups = Sequence[Mapping[int, Collection[object]]]


@dataclass(frozen=True, slots=True)
class Placement:
    """File numbers and names of a rank, which the coordinator sends as `SavePlan.storage_data`."""

    files: Mapping[int, str]
    stamp: Mapping[str, str]
    """Metadata of the save, written to each of its files."""


def names_of_files(groups: Groups, highest: int) -> list[dict[int, str]]:
    """Return number → name of each rank's files, numbered consecutively if several ranks write one number."""
    pairs = [(number, rank) for rank, numbers in enumerate(groups) for number in numbers]
    if len({number for number, _ in pairs}) == len(pairs):
        names = {(number, rank): shard_name(number, highest) for number, rank in pairs}
    else:
        pairs.sort()
        count = len(pairs)
        names = {pair: shard_name(n, count) for n, pair in enumerate(pairs, 1)}
    return [{number: names[number, rank] for number in numbers} for rank, numbers in enumerate(groups)]


def sharded_files(groups: Groups, highest: int) -> list[dict[int, str]]:
    """Return number → name of each rank's shard files, with its position among the writing ranks, from 1 on."""
    writing = [rank for rank, numbers in enumerate(groups) if numbers]
    return [
        {n: f"shard-{writing.index(rank) + 1:05d}-{shard_name(n, highest)}" for n in numbers}
        for rank, numbers in enumerate(groups)
    ]


def items_by_file(
    items: Iterable[WriteItem], files: Mapping[int, str], number: Callable[[str], int]
) -> dict[str, list[WriteItem]]:
    """Return file name → items of a rank. A name is unique within a file: further boxes go to `…-part-2`, …."""
    found: dict[str, list[WriteItem]] = defaultdict(list)
    seen: set[tuple[str, str]] = set()
    for item in items:
        name = first = files[number(item.index.fqn)]
        part = 1
        while (name, item.index.fqn) in seen:
            part += 1
            name = f"{first.removesuffix(SUFFIX)}-part-{part}{SUFFIX}"
        seen.add((name, item.index.fqn))
        found[name].append(item)
    return found


def write_part(
    store: Store, names: tuple[str, str], items: Iterable[WriteItem], metadata: Mapping[str, str], planner: SavePlanner
) -> list[WriteResult]:
    """Write one file durably; an incomplete file is removed.

    `names` are its final and its temporary name, which each result gets as its `storage_data`.
    """
    items = sorted(items, key=lambda item: -tensor_data_of(item).properties.dtype.itemsize)
    header = build_header([(item.index.fqn, *form_of(item)) for item in items], metadata)
    results = []
    with store.create(names[1]) as sink:
        sink.write([header])
        for item in items:
            size = 0
            for piece in cast_pieces(item, planner.resolve_data(item), form_of(item)[0]):
                sink.write([piece])
                size += len(piece)
            results.append(WriteResult(item.index, size, names))
    return results


def sharding_metadata(items: Iterable[WriteItem]) -> dict[str, str]:
    """Return a file's metadata of its shards, as stock and our reader need it."""
    tensors = {item.index.fqn: tensor_data_of(item) for item in items}
    offsets = {name: {"saved_offsets": [*data.chunk.offsets]} for name, data in tensors.items()}
    shapes = {name: [*data.size] for name, data in tensors.items()}
    return {"DCP_VERSION": "1.0", SHARDING: json.dumps(offsets), SHAPES: json.dumps(shapes)}
