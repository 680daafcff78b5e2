"""A reader of checkpoints written from `docs/format.md` alone: standard library only, as short as the page allows.

It shows that the page is complete, and is a model for readers in other languages. It is not fast.
"""

from __future__ import annotations

import ast
import itertools
import json
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTHS = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}


@dataclass
class Item:
    """Where a stored range lies, and what it is."""

    file: str
    start: int
    stop: int
    framing: int
    chain: tuple[str, ...]
    crc32: int | None
    running: list[int]
    block_bytes: int = 0
    blocks: list[tuple[int, int]] = field(default_factory=list)  # of encoded blocks: bytes and CRC


@dataclass
class Tensor:
    """A tensor's row and its chunks: (offsets, sizes, item)."""

    name: str
    owner: int
    dtype: str
    flags: int
    shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], Item]]


@dataclass
class Checkpoint:
    """All that an index says."""

    info: dict[str, Any]
    is_stub: bool
    tensors: list[Tensor]
    objects: list[tuple[str, int, Item]]
    aliases: dict[str, int]
    paths: dict[str, tuple[Any, ...]] | None


def need(fact: bool, what: str) -> None:
    if not fact:
        raise ValueError(what)


class Manifest:
    """Section 2 and 3: footer, header, columns."""

    def __init__(self, data: bytes) -> None:
        footer = data[-64:]
        magic, major, _, flags, offset, length, head_crc, manifest_crc, index_crc = struct.unpack(
            "<8sHHIQQIII", footer[:44]
        )
        (own_crc,) = struct.unpack("<I", footer[56:60])
        need(magic == b"\x93DCPMAN\n" and footer[60:] == b"DCP\x93", "no footer")
        need(
            own_crc == zlib.crc32(footer[:56]) and major in (1, 2, 3) and offset + length + 64 == len(data),
            "bad footer",
        )
        need(zlib.crc32(data[:offset]) == head_crc, "bad head")
        blob = data[offset : offset + length]
        need(zlib.crc32(blob) == manifest_crc, "bad manifest")
        self.is_stub = bool(flags & 1)
        start = 8 + int.from_bytes(blob[:8], "little")
        header = json.loads(blob[8:start])
        metadata = json.loads(header.pop("__metadata__")["dcp-manifest"])
        self.rows, self.info, self.stored = metadata["rows"], metadata["info"], metadata["stored"]
        self.raw = {
            name: blob[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
            for name, entry in header.items()
        }
        self.widths = {name: WIDTHS[entry["dtype"]] for name, entry in header.items()}
        block_crcs = [
            zlib.crc32(self.raw[name][at : at + 65536])
            for name in sorted(self.raw, key=str.encode)
            if name != "block_crcs"
            for at in range(0, len(self.raw[name]), 65536)
        ]
        need(block_crcs == self.stored_numbers("block_crcs"), "bad blocks")
        need(zlib.crc32(self.raw["block_crcs"], zlib.crc32(blob[:start])) == index_crc, "bad index CRC")

    def stored_numbers(self, name: str) -> list[int]:
        raw, width = self.raw[name], self.widths[name]
        return [int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)]

    def column(self, name: str, count: int) -> list[int]:
        if name in self.rows:
            numbers = self.runs(name, self.rows[name])
        else:
            numbers = self.stored_numbers(name)
            if len(numbers) == 1:
                numbers *= count
        need(len(numbers) == count, f"bad column {name}")
        return numbers

    def runs(self, name: str, count: int) -> list[int]:
        parts = [self.column(f"{name}.{part}", count) for part in ("repeats", "length", "first", "step", "jump")]
        return [
            (first + piece * jump + number * step) % 2**64
            for repeats, length, first, step, jump in zip(*parts, strict=True)
            for piece in range(repeats)
            for number in range(length)
        ]

    def strings(self, name: str, table: str) -> list[str]:
        parts = cut(self.raw[f"{name}.text"], self.column(f"{name}.bytes", self.rows.get(table, 0)))
        return [part.decode("utf-8", "surrogatepass") for part in parts]


def cut(sequence: Any, lengths: list[int]) -> list[Any]:
    """Pieces of these lengths, one after another; nothing may be left."""
    ends = list(itertools.accumulate(lengths, initial=0))
    need(ends[-1] == len(sequence), "lengths do not add up")
    return [sequence[start:end] for start, end in itertools.pairwise(ends)]


def border_count(stored_bytes: int) -> int:
    step = -(-stored_bytes // 131072) * 4096
    block = min(max(step, 65536), 1048576)
    return max(0, -(-stored_bytes // block) - 1)


def read_checkpoint(path: Path) -> Checkpoint:
    """The index in a file."""
    manifest = Manifest(path.read_bytes())
    rows = manifest.rows
    tensors = read_tensors(manifest)
    objects: list[tuple[str, int, Item]] = []
    if "object" in manifest.stored:
        items = read_items(manifest, "object", rows["object"], manifest.column("object.stored_bytes", rows["object"]))
        owners = manifest.column("object.owner", rows["object"])
        objects = list(zip(manifest.strings("object.name", "object"), owners, items, strict=True))
    names = manifest.strings("alias.name", "alias")
    aliases = dict(zip(names, manifest.column("alias.target", rows["alias"]), strict=True))
    known = list(dict.fromkeys([*(tensor.name for tensor in tensors), *(name for name, *_ in objects), *aliases]))
    return Checkpoint(manifest.info, manifest.is_stub, tensors, objects, aliases, read_paths(manifest, known))


def read_tensors(manifest: Manifest) -> list[Tensor]:
    count, chunks = manifest.rows["tensor"], manifest.rows["chunk"]
    ndims = manifest.column("tensor.ndim", count)
    numbers = manifest.column("tensor.chunks", count)
    need(sum(numbers) == chunks, "bad chunk count")
    owner_row = [row for row, number in enumerate(numbers) for _ in range(number)]
    boxes: list[tuple[list[int], list[int]]] = [([], []) for _ in range(chunks)]
    for dim in range(max(ndims, default=0)):
        deep = [chunk for chunk, row in enumerate(owner_row) if ndims[row] > dim]
        offsets = manifest.column(f"chunk.offset.{dim}", len(deep))
        sizes = manifest.column(f"chunk.size.{dim}", len(deep))
        for chunk, offset, size in zip(deep, offsets, sizes, strict=True):
            boxes[chunk][0].append(offset)
            boxes[chunk][1].append(size)
    dtypes = manifest.strings("dtype", "dtype")
    item_bytes = manifest.column("dtype.item_bytes", len(dtypes))
    kinds = manifest.column("tensor.dtype", count)
    if "chunk.stored_bytes" in manifest.raw:
        stored = manifest.column("chunk.stored_bytes", chunks)
    else:
        stored = [math.prod(boxes[chunk][1]) * item_bytes[kinds[row]] for chunk, row in enumerate(owner_row)]
    order = list(range(chunks))
    if "level" in manifest.rows:
        places = [place for number in numbers for place in range(number)]
        order.sort(key=lambda chunk: places[chunk])
    items = read_items(manifest, "chunk", chunks, stored, order)
    table = zip(
        manifest.strings("tensor.name", "tensor"),
        manifest.column("tensor.owner", count),
        kinds,
        manifest.column("tensor.flags", count),
        cut(manifest.column("tensor.shape", sum(ndims)), ndims),
        cut([(tuple(box[0]), tuple(box[1]), item) for box, item in zip(boxes, items, strict=True)], numbers),
        strict=True,
    )
    return [
        Tensor(name, owner, dtypes[kind], flags, tuple(shape), own) for name, owner, kind, flags, shape, own in table
    ]


def read_items(
    manifest: Manifest, table: str, count: int, stored: list[int], order: list[int] | None = None
) -> list[Item]:
    order = order or list(range(count))  # rows in the order of their CRCs

    def column(name: str) -> list[int]:
        return manifest.column(f"{table}.{name}", count)

    files = manifest.strings("file", "file")
    leads = manifest.column("frame.lead", manifest.rows["frame"])
    chain_links = manifest.column("chain.links", manifest.rows["chain"])
    chains = [(), *map(tuple, cut(manifest.strings("link", "link"), chain_links))]
    checked = column("checked")
    has_blocks = f"{table}.blocks" in manifest.raw
    counts = column("blocks") if has_blocks else [0] * count
    sizes = column("block_bytes") if has_blocks else counts
    blocks = []
    if has_blocks:
        blocks = list(zip(manifest.stored_numbers("block.bytes"), manifest.stored_numbers("block.crc32"), strict=True))
    encoded = cut(blocks, counts)
    borders = [
        border_count(size) if is_checked and not number else 0
        for size, is_checked, number in zip(stored, checked, counts, strict=True)
    ]
    running = dict(
        zip(order, cut(manifest.stored_numbers(f"{table}.running"), [borders[row] for row in order]), strict=True)
    )
    crcs = dict(zip(order, column("crc32"), strict=True))
    found = []
    for row, size in enumerate(stored):
        start = column("position")[row] + leads[column("frame")[row]]
        crc = crcs[row] if checked[row] else None
        chain = chains[column("chain")[row]]
        framing = column("framing")[row]
        place = files[column("file")[row]], start, start + size
        found.append(Item(*place, framing, chain, crc, running[row], sizes[row], encoded[row]))
    return found


def element(text: str, kind: int) -> Any:
    if kind == 0:
        return text
    return int(text) if kind < 3 else ast.literal_eval(text)


def read_paths(manifest: Manifest, names: list[str]) -> dict[str, tuple[Any, ...]] | None:
    rows = manifest.rows
    if "path" not in rows:
        return None
    own_names = "path.name.text" in manifest.raw
    names = manifest.strings("path.name", "path") if own_names else names
    texts = manifest.strings("path.text", "path") if "path.text.text" in manifest.raw else names
    elements = manifest.column("path.elements", rows["path"])
    lengths = cut(manifest.column("path.element_bytes", rows["separator"]), [max(0, n - 1) for n in elements])
    kinds = cut(manifest.column("path.kind", rows["element"]), elements)
    paths: dict[str, tuple[Any, ...]] = {}
    for name, text, count, own_lengths, own_kinds in zip(names, texts, elements, lengths, kinds, strict=True):
        rest = text.encode("utf-8", "surrogatepass")
        parts = []
        for length in own_lengths:
            parts.append(rest[:length])
            need(rest[length : length + 1] == b".", "bad path")
            rest = rest[length + 1 :]
        decoded = [part.decode("utf-8", "surrogatepass") for part in [*parts, rest]][:count]
        if count or own_names:
            paths[name] = tuple(element(part, kind) for part, kind in zip(decoded, own_kinds, strict=True))
    return paths


def read_stored(folder: Path, item: Item) -> bytes:
    """The bytes of a stored range, checked whole and block by block."""
    with (folder / item.file).open("rb") as file:
        file.seek(item.start)
        data = file.read(item.stop - item.start)
    if item.crc32 is not None:
        need(zlib.crc32(data) == item.crc32, "bad item")
        if item.blocks:
            for part, (_, crc) in zip(cut(data, [length for length, _ in item.blocks]), item.blocks, strict=True):
                need(zlib.crc32(part) == crc, "bad encoded block")
            return data
        size = len(data)
        block = min(max(-(-size // 131072) * 4096, 65536), 1048576)
        crcs = [0, *item.running, item.crc32]
        for number, start in enumerate(range(0, size, block)):
            need(zlib.crc32(data[start : start + block], crcs[number]) == crcs[number + 1], "bad block")
    return data


def decode(item: Item, data: bytes, zstd: Callable[[bytes], bytes]) -> bytes:
    """Section 10: what a stored range was before its transforms. `zstd` decodes one Zstandard frame."""
    if item.chain == ("stream.zstd/1",):
        return zstd(data)
    decoders = {"block.zstd/1": zstd, "block.planes/1": lambda block: decode_planes(block, zstd)}
    blocks = cut(data, [length for length, _ in item.blocks])
    for name in item.chain:
        blocks = [decoders[name](block) for block in blocks]
    need(all(len(block) == item.block_bytes for block in blocks[:-1]), "bad block length")
    return b"".join(blocks)


WIDTHS_OF_GROUPS = {1: (1,), 2: (1, 1), 4: (2, 1, 1), 8: (4, 2, 1, 1)}


def decode_planes(block: bytes, zstd: Callable[[bytes], bytes]) -> bytes:
    layout, size = block[0], int.from_bytes(block[1:5], "little")
    word = 1 << (layout & 3)
    widths = (1,) * word if layout & 16 else WIDTHS_OF_GROUPS[word][:: -1 if layout & 8 else 1]
    lengths = [int.from_bytes(block[5 + 4 * n : 9 + 4 * n], "little") for n in range(len(widths))]
    groups = cut(block[5 + 4 * len(widths) :], lengths)
    count, words, first = size // word, [0] * (size // word), 0
    for width, group in zip(widths, groups, strict=True):
        plain = group if len(group) == count * width else zstd(group)
        need(len(plain) == count * width, "bad group")
        for n in range(count):
            words[n] |= int.from_bytes(plain[n * width : (n + 1) * width], "little") << 8 * first
        first += width
    if layout & 4:
        words = [number >> 1 | (number & 1) << 8 * word - 1 for number in words]
    return b"".join(number.to_bytes(word, "little") for number in words)
