"""Writer of the head of `.metadata`: a pickle that stock reads as its own `Metadata`.

The pickle is written opcode by opcode, so torch is not needed. `docs/format.md` describes stock's pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise, repeat

import numpy as np

from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, PathElement, TensorFlags
from dcp_manifest.index.items import Framing
from dcp_manifest.pickles.opcodes import MEMOIZE, PickleWriter, collected, global_, integer, text
from dcp_manifest.stock.stock_class_paths import FILESYSTEM, GET_LAYOUT, METADATA, STOCK_VERSION, TORCH

__all__ = ["MARKER_MODULE", "is_stock_readable", "stock_head", "unreadable_reason"]

MARKER_MODULE = "dcp-manifest/1"
"""Marker in `StorageMeta.modules` of every head: our reader then requires a manifest. Stock ignores the marker."""
_STOCK_CHAINS = {(), ("stream.zstd/1",)}
_NEW, _STATE, _DONE = b")\x81", b"}(", b"ub"
_NONE, _TRUE, _FALSE = b"N", b"\x88", b"\x89"
Box = tuple[int, ...]


def unreadable_reason(index: CheckpointIndex) -> str | None:
    """Return the reason why stock cannot load a checkpoint with this index, as a clause; None if stock can load it."""
    if index.tensor_owner.any() or index.object_owner.any():
        return "it holds values that belong to single ranks"
    if index.chunk_items is None or index.object_items is None:
        return "its index does not say where values are stored"
    if not set(index.chains) <= _STOCK_CHAINS:
        return "its data went through transforms that torch.distributed.checkpoint does not know"
    if not _are_archives(index.chunk_items) or not _are_archives(index.object_items):
        return "its data files have a layout that torch.distributed.checkpoint does not know"
    return None


def is_stock_readable(index: CheckpointIndex) -> bool:
    """Whether stock can load every value of a checkpoint with this index."""
    return unreadable_reason(index) is None


def _are_archives(items: ItemColumns) -> bool:
    """Whether every item is a whole `torch.save` archive after decoding."""
    trail = items.length - items.lead - items.stored_bytes
    framed = (items.framing == Framing.RAW) & (items.chain == 0) & (items.lead > 0) & (trail > 0)
    whole = (items.framing != Framing.RAW) & (items.lead == 0) & (trail == 0)
    return bool(np.all(framed | whole))


def stock_head(index: CheckpointIndex) -> bytes:
    """Return the pickle that stock loads as a `Metadata` equal to the index.

    `StorageMeta.modules` in it contains `MARKER_MODULE`, by which this project's readers know that a manifest follows.

    Args:
        index: An index for which `is_stock_readable` is True; an alias becomes an entry that shares its tensor's items.
    """
    return _Head(index).pickle()


class _Head:
    """Builder of one head.

    Values that occur more than once are memoized at the beginning, the most frequent first: these get the shortest
    references, and the rest can be assembled in any order.
    """

    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self.out = out = PickleWriter()
        keys = ("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")
        self.key = {key: out.prepare(text(key)) for key in keys}
        classes = ("TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata")
        self.new = {name: out.prepare(global_(METADATA, name)) + _NEW for name in (*classes, "MetadataIndex")}
        self.new["_StorageInfo"] = out.prepare(global_(FILESYSTEM, "_StorageInfo")) + _NEW
        self.size_class = out.prepare(global_(TORCH, "Size"))
        properties = dict(self.prepared_properties())
        self.files = [out.prepare(text(name)) for name in index.files]
        kinds = zip(index.tensor_dtype.tolist(), index.tensor_flags.tolist(), strict=True)
        self.properties = [properties[kind] for kind in kinds]
        # Rows of the table of tensors, for each name (aliases included).
        self.rows = dict(zip(index.tensor_names, range(len(index.tensor_names)), strict=True))
        self.rows.update(zip(index.alias_names, index.alias_targets.tolist(), strict=True))
        self.starts: list[int] = index.chunk_starts().tolist()
        self.sizes: dict[Box, bytes] = {}
        self.shapes = self.prepared_sizes(_shapes(index))
        self.chunk_sizes = self.prepared_sizes(_boxes(index, index.chunk_sizes.tolist()))
        self.chunk_offsets = self.prepared_sizes(_boxes(index, index.chunk_offsets.tolist()))
        self.parts = dict(self.prepared_parts())
        # Names are memoized where they first occur, as keys of the entries, in this order.
        self.texts = {name: out.reserve() for name in (*self.rows, *index.object_names)}

    def pickle(self) -> bytes:
        """Return the whole head."""
        out, objects = self.out, self.index.object_names
        out.put(global_(METADATA, "Metadata") + _NEW + _STATE + text("state_dict_metadata") + _STATE)
        out.put_all(self.tensors())
        out.put_all(b"".join((text(name), MEMOIZE, self.new["BytesStorageMetadata"])) for name in objects)
        out.put(b"u" + text("planner_data"))
        out.put_all(self.paths())
        out.put(text("storage_data") + _STATE)
        out.put_all(self.stored_chunks())
        out.put_all(self.stored_objects())
        out.put(b"u" + text("storage_meta") + self.storage_meta() + text("version") + text(STOCK_VERSION) + _DONE)
        return out.getvalue()

    def prepared_sizes(self, values: Iterable[Box]) -> list[bytes]:
        """Memoize each size as a `torch.Size`; returns opcodes that push it."""
        values = list(values)
        sizes, size_class, prepare = self.sizes, self.size_class, self.out.prepare
        for value in dict.fromkeys(values):
            if value not in sizes:
                sizes[value] = prepare(size_class + collected(list(map(integer, value))) + b"\x85R")
        return list(map(sizes.__getitem__, values))

    def prepared_properties(self) -> Iterator[tuple[tuple[int, int], bytes]]:
        """Yield each pair (dtype, flags), with opcodes that push a new `TensorProperties`."""
        index = self.index
        pairs = sorted(set(zip(index.tensor_dtype.tolist(), index.tensor_flags.tolist(), strict=True)))
        for dtype, bits in pairs:
            flags = TensorFlags.from_bits(bits)
            fields = (
                global_(TORCH, index.dtypes[dtype]),
                global_(*GET_LAYOUT) + text(f"torch.{flags.layout}") + b"\x85R",
                _TRUE if flags.requires_grad else _FALSE,
                global_(METADATA, "_MEM_FORMAT_ENCODING") + integer(flags.memory_format) + b"\x85R",
                _TRUE if flags.pin_memory else _FALSE,
            )
            yield (dtype, bits), self.new["TensorProperties"] + self.out.prepare(collected(fields)) + b"b"

    def tensors(self) -> Iterator[bytes]:
        """Yield opcodes that push each name with its `TensorStorageMetadata`."""
        chunk, sizes = self.new["ChunkStorageMetadata"] + _STATE + self.key["offsets"], self.key["sizes"]
        tensor = MEMOIZE + self.new["TensorStorageMetadata"] + _STATE + self.key["properties"]
        size, begin, end = self.key["size"], self.key["chunks"] + b"](", b"e" + _DONE
        offsets, extents = self.chunk_offsets, self.chunk_sizes
        alike: dict[tuple[bytes, ...], bytes] = {}
        for name, row in self.rows.items():
            start, stop = self.starts[row], self.starts[row + 1]
            kind = (self.properties[row], self.shapes[row], *offsets[start:stop], *extents[start:stop])
            tail = alike.get(kind)
            if tail is None:
                boxes = zip(offsets[start:stop], extents[start:stop], strict=True)
                own = [b"".join((chunk, offset, sizes, extent, _DONE)) for offset, extent in boxes]
                tail = alike[kind] = b"".join((tensor, kind[0], size, kind[1], begin, *own, end))
            yield text(name) + tail

    def prepared_parts(self) -> Iterator[tuple[PathElement, bytes]]:
        """Yield each path element that is not itself a name, with opcodes that push it."""
        paths = self.index.paths or {}
        names = {*self.rows, *self.index.object_names}
        # A `LiteralKey` equals the text that stock writes for the key.
        for part in dict.fromkeys(chain(paths, chain.from_iterable(paths.values()))):
            if not isinstance(part, str):
                yield part, integer(part)
            elif part not in names:
                yield part, self.out.prepare(text(part))

    def paths(self) -> Iterator[bytes]:
        """Yield opcodes that push the planner data: names with their paths."""
        if self.index.paths is None:
            yield _NONE
            return
        parts = dict(self.parts)
        parts.update(self.texts)
        yield _STATE
        for name, path in self.index.paths.items():
            yield parts[name] + collected([parts[part] for part in path])
        yield b"u"

    def stored_chunks(self) -> Iterator[bytes]:
        """Yield opcodes that push each chunk's `MetadataIndex` with its `_StorageInfo`."""
        if self.index.chunk_items is None:
            return
        key, index, offset = self.new["MetadataIndex"] + _STATE + self.key["fqn"], self.key["index"], self.key["offset"]
        places = list(self.places(self.index.chunk_items))
        positions = [index + integer(n) + offset for n in range(int(self.index.tensor_chunks.max(initial=0)))]
        for name, row in self.rows.items():
            start = key + self.texts[name]
            own = slice(self.starts[row], self.starts[row + 1])
            for position, place, at in zip(positions, places[own], self.chunk_offsets[own], strict=False):
                yield b"".join((start, position, at, place))

    def stored_objects(self) -> Iterator[bytes]:
        """Yield opcodes that push each object's `MetadataIndex` with its `_StorageInfo`."""
        if self.index.object_items is None:
            return
        key, no_index = self.new["MetadataIndex"] + _STATE + self.key["fqn"], self.key["index"] + _NONE
        for name, place in zip(self.index.object_names, self.places(self.index.object_items), strict=True):
            yield b"".join((key, self.texts[name], no_index, place))

    def places(self, items: ItemColumns) -> Iterator[bytes]:
        """Yield, for each item, opcodes that complete its key and push its `_StorageInfo`."""
        start = _DONE + self.new["_StorageInfo"] + _STATE + self.key["relative_path"]
        offset, length = self.key["offset"], self.key["length"]
        ends = [_DONE, *(_descriptors(links) + _DONE for links in self.index.chains)]
        columns = (items.file, items.offset, items.length, items.chain)
        for file, first, size, links in zip(*(column.tolist() for column in columns), strict=True):
            yield b"".join((start, self.files[file], offset, integer(first), length, integer(size), ends[links]))

    def storage_meta(self) -> bytes:
        """Return opcodes that push the `StorageMeta`."""
        save_id = _NONE if self.index.info is None else text(self.index.info.save_id)
        ids = text("checkpoint_id") + _NONE + text("save_id") + save_id + text("load_id") + _NONE
        modules = text("modules") + b"]" + text(MARKER_MODULE) + b"a"
        return global_(METADATA, "StorageMeta") + _NEW + _STATE + ids + modules + _DONE


def _descriptors(links: tuple[str, ...]) -> bytes:
    """Return the transforms of an item in stock's order, the reverse of decoding order."""
    return text("transform_descriptors") + b"](" + b"".join(map(text, reversed(links))) + b"e"


def _shapes(index: CheckpointIndex) -> Iterator[Box]:
    numbers = index.tensor_shape.tolist()
    return (tuple(numbers[start:stop]) for start, stop in pairwise(index.shape_starts().tolist()))


def _boxes(index: CheckpointIndex, numbers: list[int]) -> Iterator[Box]:
    """Yield the offsets or sizes of each chunk, from the flat column."""
    following = iter(numbers)
    for ndim, chunks in zip(index.tensor_ndim.tolist(), index.tensor_chunks.tolist(), strict=True):
        if ndim == 0:
            yield from repeat((), chunks)
        else:
            for _ in range(chunks):
                yield tuple(islice(following, ndim))
