"""`Content` of a checkpoint, from its index: tensors and objects are read and verified when they are used.

`checkpoint` reads the index of a checkpoint (of this project or of stock), `safetensors_index` makes the index of
safetensors files.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from dcp_core.errors import CorruptCheckpointError, UnsupportedValueError
from dcp_core.toolkit import ItemDecoder
from dcp_core.transforms import ExtensionRegistry
from dcp_format.checkpoints.chunk_pieces import ChunkPieces
from dcp_format.checkpoints.stored_chunks import ChunkReader
from dcp_format.content.content import Content, TensorEntry
from dcp_io import ReadRequest, Store, read_items
from dcp_manifest import (
    CheckpointIndex,
    StoredChunk,
    StoredItem,
    TensorFlags,
    coverage_problems,
    stored_objects,
    stored_tensors,
)

__all__ = ["stored_content"]


def stored_content(store: Store, index: CheckpointIndex) -> Content:
    """Return the `Content` of a checkpoint, given its index.

    Args:
        store: Store of the folder that contains the index's files.
        index: Index of a whole checkpoint.

    Raises:
        CorruptCheckpointError: Chunks do not cover their tensor, or the index has no file location of a chunk.
        UnsupportedValueError: The checkpoint has values that belong to one rank only, which other formats cannot store.
    """
    _check_owners(index, store.url)
    problems = coverage_problems(index)
    if problems:
        name, sentence = problems[0]
        raise CorruptCheckpointError(f"{sentence}; the checkpoint in {store.url} is incomplete", key=name)
    reader = ChunkReader(store)
    tensors = {entry.name: entry for entry in _entries(index, reader)}
    reader.prepare([chunk for entry in tensors.values() for chunk in _chunks_of(entry)])
    names = index.tensor_names
    targets = [names[row] for row in index.alias_targets.tolist()]
    return Content(
        url=store.url,
        tensors=tensors,
        objects={name: functools.partial(_object, store, name, item) for name, item in stored_objects(index)},
        aliases=dict(zip(index.alias_names, targets, strict=True)),
        paths=index.paths,
    )


def _check_owners(index: CheckpointIndex, url: str) -> None:
    owned = [name for name, owner in zip(index.tensor_names, index.tensor_owner.tolist(), strict=True) if owner]
    owned += [name for name, owner in zip(index.object_names, index.object_owner.tolist(), strict=True) if owner]
    if owned:
        raise UnsupportedValueError(
            f"{url} holds values of single ranks, such as {sorted(set(owned))[:4]}: other formats have no place for "
            "one value per rank; load them with dcp_core.PerRank, and save a checkpoint without them to convert"
        )


def _chunks_of(entry: TensorEntry) -> tuple[StoredChunk, ...]:
    return entry.data.chunks if isinstance(entry.data, ChunkPieces) else ()


def _entries(index: CheckpointIndex, reader: ChunkReader) -> Iterator[TensorEntry]:
    if index.chunk_items is None and index.tensor_names:
        raise CorruptCheckpointError("the index does not say where values are stored", key=index.tensor_names[0])
    for each in stored_tensors(index):
        data = ChunkPieces(reader, each.dtype, each.shape, each.chunks)
        flags = TensorFlags.from_bits(each.flags)
        yield TensorEntry(each.name, each.dtype, each.shape, data, flags.requires_grad)


def _object(store: Store, name: str, item: StoredItem) -> bytes:
    """Return the bytes of an object, verified and decoded."""
    decoder, found = ItemDecoder(ExtensionRegistry()), list[bytes]()

    def done(data: memoryview) -> None:
        found.append(bytes(decoder.object(name, item, data)))

    read_items(store, [ReadRequest(name, item, 0, item.stored_bytes, None, done)])
    return found[0]
