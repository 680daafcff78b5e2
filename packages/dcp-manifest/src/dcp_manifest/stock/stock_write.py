"""Writer of the head of `.metadata`: a pickle that stock reads as its `Metadata`, or a stub that raises the reason.

Source: torch 2.13 `torch.distributed.checkpoint.metadata` and `.filesystem`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.columns import RAW, CheckpointIndex, ItemColumns, PathElement, TensorFlags

METADATA = "torch.distributed.checkpoint.metadata"
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
TORCH = "torch"
GET_LAYOUT = ("torch.serialization", "_get_layout")
STOCK_VERSION = "1.0.0"
MARKER_MODULE = "dcp-manifest/1"
"""In `StorageMeta.modules` of every head: our reader then requires a manifest. Stock ignores it."""
_STOCK_CHAINS = {(), ("stream.zstd/1",)}
_NEW, _STATE, _DONE = b")\x81", b"}(", b"ub"
_NONE, _TRUE, _FALSE = b"N", b"\x88", b"\x89"


def unreadable_reason(index: CheckpointIndex) -> str | None:
    """Return why stock cannot load a checkpoint, as a clause; None if it can."""
    if index.tensor_owner.any() or index.object_owner.any():
        return "it holds values that belong to single ranks"
    if index.chunk_items is None or index.object_items is None:
        return "its index does not say where values are stored"
    if not set(index.chains) <= _STOCK_CHAINS:
        return "its data went through transforms that torch.distributed.checkpoint does not know"
    if not _are_archives(index.chunk_items) or not _are_archives(index.object_items):
        return "its data files have a layout that torch.distributed.checkpoint does not know"
    return None


def _are_archives(items: ItemColumns) -> bool:
    trail = items.length - items.lead - items.stored_bytes
    framed = (items.framing == RAW) & (items.chain == 0) & (items.lead > 0) & (trail > 0)
    whole = (items.framing != RAW) & (items.lead == 0) & (trail == 0)
    return bool(np.all(framed | whole))


def stock_head(index: CheckpointIndex) -> bytes:
    """Return the pickle that stock loads as a `Metadata` equal to the index, without an `unreadable_reason`.

    An alias becomes an entry that shares its tensor's items.
    """
    return _Head(index).pickle()


class _Head:
    # Repeated values are memoized first, the most frequent with the shortest references.
    def __init__(self, index: CheckpointIndex) -> None:
        self.index = index
        self.out = out = _PickleWriter(b"".join(_COMMON.parts), _COMMON.remembered)
        properties = dict(self.prepared_properties())
        self.files = [out.prepare(text(name)) for name in index.files]
        kinds = zip(index.tensor_dtype.tolist(), index.tensor_flags.tolist(), strict=True)
        self.properties = [properties[kind] for kind in kinds]
        # Rows of the table of tensors, for each name (aliases included).
        self.rows = dict(zip(index.tensor_names, range(len(index.tensor_names)), strict=True))
        self.rows.update(zip(index.alias_names, index.alias_targets.tolist(), strict=True))
        self.starts: list[int] = index.chunk_starts().tolist()
        self.sizes: dict[tuple[int, ...], bytes] = {}
        chunk_ndim = index.tensor_ndim.repeat(index.tensor_chunks)
        self.shapes = self.prepared_sizes(index.tensor_ndim, index.tensor_shape)
        self.chunk_sizes = self.prepared_sizes(chunk_ndim, index.chunk_sizes)
        self.chunk_offsets = self.prepared_sizes(chunk_ndim, index.chunk_offsets)
        self.parts = dict(self.prepared_parts())
        # Names are memoized where they first occur, as keys of the entries, in this order.
        names = (*self.rows, *index.object_names)
        self.texts = dict(zip(names, out.reserve(len(names)), strict=True))

    def pickle(self) -> bytes:
        out, objects = self.out, self.index.object_names
        out.put(global_(METADATA, "Metadata") + _NEW + _STATE + text("state_dict_metadata") + _STATE)
        out.put_all(self.tensors())
        for name in objects:
            out.put(b"".join((text(name), MEMOIZE, _NEW_OF["BytesStorageMetadata"])))
        out.put(b"u" + text("planner_data"))
        out.put_all(self.paths())
        out.put(text("storage_data") + _STATE)
        out.put_all(self.stored_items())
        save_id = _NONE if self.index.info is None else text(self.index.info.save_id)
        ids = text("checkpoint_id") + _NONE + text("save_id") + save_id + text("load_id") + _NONE
        modules = text("modules") + b"]" + text(MARKER_MODULE) + b"a"
        out.put(b"u" + text("storage_meta") + global_(METADATA, "StorageMeta") + _NEW + _STATE + ids + modules + _DONE)
        out.put(text("version") + text(STOCK_VERSION) + _DONE + b".")
        return b"".join(out.parts)

    def prepared_sizes(self, ndim: npt.NDArray[Any], numbers: npt.NDArray[np.int64]) -> list[bytes]:
        sizes, prepare = self.sizes, self.out.prepare
        following = iter(numbers.tolist())
        values = [tuple(islice(following, dims)) for dims in ndim.tolist()]
        for value in dict.fromkeys(values):
            if value not in sizes:
                sizes[value] = prepare(_SIZE_CLASS + collected(list(map(integer, value))) + b"\x85R")
        return list(map(sizes.__getitem__, values))

    def prepared_properties(self) -> Iterator[tuple[tuple[int, int], bytes]]:
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
            yield (dtype, bits), _NEW_OF["TensorProperties"] + self.out.prepare(collected(fields)) + b"b"

    def tensors(self) -> Iterator[bytes]:
        chunk, sizes = _NEW_OF["ChunkStorageMetadata"] + _STATE + _KEY["offsets"], _KEY["sizes"]
        tensor = MEMOIZE + _NEW_OF["TensorStorageMetadata"] + _STATE + _KEY["properties"]
        size, begin, end = _KEY["size"], _KEY["chunks"] + b"](", b"e" + _DONE
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
        paths = self.index.paths or {}
        names = {*self.rows, *self.index.object_names}
        # A `LiteralKey` equals the text that stock writes for the key.
        for part in dict.fromkeys(chain(paths, chain.from_iterable(paths.values()))):
            if not isinstance(part, str):
                yield part, integer(part)
            elif part not in names:
                yield part, self.out.prepare(text(part))

    def paths(self) -> Iterator[bytes]:
        if self.index.paths is None:
            yield _NONE
            return
        parts = dict(self.parts)
        parts.update(self.texts)
        yield _STATE
        for name, path in self.index.paths.items():
            start, end = (b"", _TUPLES[len(path)]) if len(path) <= 3 else (b"(", b"t")
            yield b"".join((parts[name], start, *map(parts.__getitem__, path), end))
        yield b"u"

    def stored_items(self) -> Iterable[bytes]:
        entries: list[Iterable[Iterable[bytes]]] = []
        chunks, objects = self.index.chunk_items, self.index.object_items
        key, index, offset = _NEW_OF["MetadataIndex"] + _STATE + _KEY["fqn"], _KEY["index"], _KEY["offset"]
        if chunks is not None:
            places, own = self.places(chunks), [range(*self.starts[row : row + 2]) for row in self.rows.values()]
            counts, order = [*map(len, own)], [*chain.from_iterable(own)]
            positions = [index + integer(number) + offset for number in range(max(counts, default=0))]
            names = chain.from_iterable(map(repeat, map(self.texts.__getitem__, self.rows), counts))
            numbers = chain.from_iterable([positions[:count] for count in counts])
            offsets = map(self.chunk_offsets.__getitem__, order)
            entries.append(zip(repeat(key), names, numbers, offsets, map(places.__getitem__, order)))
        if objects is not None:
            own_names = map(self.texts.__getitem__, self.index.object_names)
            entries.append(zip(repeat(key), own_names, repeat(index + _NONE), self.places(objects)))
        return chain.from_iterable(chain.from_iterable(entries))

    def places(self, items: ItemColumns) -> list[bytes]:
        start = _DONE + _NEW_OF["_StorageInfo"] + _STATE + _KEY["relative_path"]
        starts = [start + file + _KEY["offset"] for file in self.files]
        ends = [_DONE, *[_descriptors(links) + _DONE for links in self.index.chains]]
        lengths = items.length.tolist()
        known = {length: _KEY["length"] + integer(length) for length in set(lengths)}
        pieces = (
            map(starts.__getitem__, items.file.tolist()),
            map(integer, items.offset.tolist()),
            map(known.__getitem__, lengths),
            map(ends.__getitem__, items.chain.tolist()),
        )
        return list(map(b"".join, zip(*pieces, strict=True)))


def _descriptors(links: tuple[str, ...]) -> bytes:
    """Stock's order is the reverse of decoding order."""
    return text("transform_descriptors") + b"](" + b"".join(map(text, reversed(links))) + b"e"


MEMOIZE = b"\x94"
_U32 = struct.Struct("<I")
_LONG_GET = struct.Struct("<cI")
_SHORT_TEXT = [bytes((0x8C, length)) for length in range(256)]
_SMALL = [bytes((75, value)) for value in range(256)]
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")


def integer(value: int) -> bytes:
    """Return opcodes that push an int."""
    if 0 <= value < 256:
        return _SMALL[value]
    if 0 <= value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data


def text(value: str) -> bytes:
    """Return opcodes that push a str."""
    data = value.encode("utf-8", "surrogatepass")
    return _SHORT_TEXT[len(data)] + data if len(data) < 256 else text_2(value)


def text_2(value: str) -> bytes:
    """Like `text`, of protocol 2."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + _U32.pack(len(data)) + data


def global_(module: str, name: str) -> bytes:
    """Return opcodes that push a class or function."""
    return text(module) + text(name) + b"\x93"


def global_2(module: str, name: str) -> bytes:
    """Like `global_`, of protocol 2."""
    return f"c{module}\n{name}\n".encode()


def collected(items: Sequence[bytes]) -> bytes:
    """Return opcodes that push a tuple of values."""
    if len(items) <= 3:
        return b"".join((*items, _TUPLES[len(items)]))
    return b"".join((b"(", *items, b"t"))


class _PickleWriter:
    def __init__(self, start: bytes = b"\x80\x04", remembered: int = 0) -> None:
        self.parts: list[bytes] = [start]
        self.put = self.parts.append
        self.put_all = self.parts.extend
        self.remembered = remembered

    def reserve(self, count: int) -> list[bytes]:
        """Return opcodes that push the next slots. The caller appends a `MEMOIZE` for each."""
        slots = range(self.remembered, self.remembered + count)
        self.remembered = slots.stop
        return [bytes((104, slot)) if slot < 256 else _LONG_GET.pack(b"j", slot) for slot in slots]

    def prepare(self, opcodes: bytes) -> bytes:
        """Return opcodes that push a memoized value."""
        self.parts.append(opcodes + MEMOIZE + b"0")
        return self.reserve(1)[0]


# What every head memoizes first, so that the references are short.
_COMMON = _PickleWriter()
_KEY = {
    key: _COMMON.prepare(text(key))
    for key in ("properties", "size", "chunks", "offsets", "sizes", "fqn", "index", "offset", "relative_path", "length")
}
_NEW_OF = {
    name: _COMMON.prepare(global_(module, name)) + _NEW
    for module, name in (
        (METADATA, "TensorStorageMetadata"),
        (METADATA, "TensorProperties"),
        (METADATA, "ChunkStorageMetadata"),
        (METADATA, "BytesStorageMetadata"),
        (METADATA, "MetadataIndex"),
        (FILESYSTEM, "_StorageInfo"),
    )
}
_SIZE_CLASS = _COMMON.prepare(global_(TORCH, "Size"))


_START = b"\x80\x04" + text("dcp-manifest stub") + b"0"


def is_stub(data: bytes | memoryview) -> bool:
    """Whether a `.metadata` file begins with a pickle that fails in stock."""
    return bytes(data[: len(_START)]) == _START


def stub_head(reason: str) -> bytes:
    """Return a pickle that raises RuntimeError; the message names writer, reason and remedy.

    `reason` completes a sentence after "because".
    """
    sentence = (
        "this checkpoint was written by dcp (dcp-manifest) and torch.distributed.checkpoint cannot load it, because "
        f"{reason}; load it with dcp_all.load (pip install dcp-all), or save it again there with layout='torch' and "
        "interop=True"
    )
    # A failed future is the shortest way to raise a chosen message inside any unpickler.
    futures = "concurrent.futures"
    writer = _PickleWriter(_START)
    future = writer.prepare(global_(futures, "Future") + b")R")
    error = writer.prepare(global_("builtins", "RuntimeError") + text(sentence) + b"\x85R")
    writer.put(global_(futures, "Future.set_exception") + future + error + b"\x86R0")
    writer.put(global_(futures, "Future.result") + future + b"\x85R.")
    return b"".join(writer.parts)
