"""Float planes compression: bytes at the same position in all elements are grouped; compressible groups are compressed.

A model's exponents have few different values, its mantissas are noise. So each element is rotated left by one bit,
which moves the exponent into the top byte, and its bytes are split into groups. A group is compressed if it becomes
smaller.

The bytes of a block are in docs/format.md (`block.planes/1`).
"""

from __future__ import annotations

import copy
import functools
import struct
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp_core.block_transforms import BlockTransformExtension
from dcp_transforms.frames import FrameCompressor, decompress
from dcp_transforms.versioned import Versioned

_HEAD: Final = struct.Struct("<BI")
_ROTATED, _INTEGERS, _SINGLE_BYTES = 4, 8, 16
_WIDTHS = {1: (1,), 2: (1, 1), 4: (2, 1, 1), 8: (4, 2, 1, 1)}
_FLOATS = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "complex32": 2, "complex64": 4, "complex128": 8,
}  # fmt: skip
_INTEGER_BYTES = {"int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8}
# A group is compressed if that saves so much of it: less is not worth the time that reading it takes.
_MIN_GAIN = 0.02
_MAX_VIEWS = 64
_UNSIGNED: Final = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}

Words = npt.NDArray[np.unsignedinteger[Any]]


class _Layout:
    def __init__(self, item_bytes: int, *, rotated: bool, integers: bool, single_bytes: bool = False) -> None:
        widths = (1,) * item_bytes if single_bytes else _WIDTHS[item_bytes][:: -1 if integers else 1]
        self.item_bytes = item_bytes
        self.rotated = rotated
        self.groups = tuple((sum(widths[:number]), width) for number, width in enumerate(widths))
        """Offset in the element and width, in bytes."""
        self.word = _UNSIGNED[item_bytes]
        flags = rotated * _ROTATED | integers * _INTEGERS | single_bytes * _SINGLE_BYTES
        self.byte = item_bytes.bit_length() - 1 | flags

    @staticmethod
    @functools.cache
    def from_byte(byte: int) -> _Layout:
        integers, single_bytes = bool(byte & _INTEGERS), bool(byte & _SINGLE_BYTES)
        if byte >= 2 * _SINGLE_BYTES or (integers and single_bytes):
            raise ValueError(f"the layout {byte:#x} is not known")
        rotated = bool(byte & _ROTATED)
        return _Layout(1 << (byte & 3), rotated=rotated, integers=integers, single_bytes=single_bytes)

    @staticmethod
    @functools.cache
    def of(dtype: str) -> _Layout:
        if dtype in _FLOATS:
            return _Layout(_FLOATS[dtype], rotated=True, integers=False)
        return _Layout(_INTEGER_BYTES.get(dtype, 1), rotated=False, integers=True)

    def for_words(self, words: Words) -> _Layout:
        """Return this layout, or single bytes if a wider group would hide a constant bit (AdamW's second moments)."""
        if self.byte & _INTEGERS or not len(words):
            return self
        varying = int(np.bitwise_or.reduce(words)) ^ int(np.bitwise_and.reduce(words))
        if self.rotated:
            varying = varying << 1 | varying >> 8 * self.item_bytes - 1
        for first, width in self.groups:
            every = (1 << 8 * width) - 1
            if width > 1 and varying >> 8 * first & every not in (0, every):
                return _Layout.from_byte(self.byte | _SINGLE_BYTES)
        return self

    def group(self, words: Words, number: int, into: npt.NDArray[np.uint8]) -> None:
        first, width = self.groups[number]
        part = into.view(_UNSIGNED[width])
        # Each step passes over as few bytes as it can, and shifts and narrows in one go: memory is the limit here.
        if not self.rotated:
            np.right_shift(words, 8 * first, out=part, casting="unsafe")
        elif first:
            np.right_shift(words, 8 * first - 1, out=part, casting="unsafe")
        else:
            doubled = _scratch.take("doubled", len(words), part.dtype)
            np.copyto(doubled, words, casting="unsafe")
            np.add(doubled, doubled, out=doubled)
            np.right_shift(words, 8 * self.item_bytes - 1, out=part, casting="unsafe")
            np.bitwise_or(part, doubled, out=part)


class FloatPlanes(Versioned, BlockTransformExtension):
    """Block transform that compresses floats by planes of bytes: bf16 weights by about a third, fp32 by a sixth.

    Lossless for every dtype and bit pattern. To load a slice, only its blocks are read and decoded.

    Example:
        ```python
        import torch
        from dcp_core import save
        from dcp_fs import FileSystemWriter
        from dcp_transforms import FloatPlanes

        writer = FileSystemWriter("step-1", compression={torch.bfloat16: FloatPlanes()})
        save({"weight": torch.randn(10_000).bfloat16()}, storage_writer=writer)
        ```
    """

    name = "block.planes"

    def __init__(self) -> None:
        self._frames = FrameCompressor.for_entropy()
        self._layout: _Layout | None = None
        self._tried: tuple[bool, ...] | None = None

    def for_item(self, sample: memoryview, dtype: str) -> tuple[FloatPlanes, float]:
        """Return a copy with settings that suit a tensor, and the estimated ratio of encoded to original size.

        `sample` has bytes of some elements, `dtype` is the dtype's name without `torch.`.
        """
        layout = _Layout.of(dtype)
        words: Words = np.frombuffer(sample, layout.word)
        layout = layout.for_words(words)
        shrinks, left = [], 0
        for number, (_, width) in enumerate(layout.groups):
            part = _scratch.take("encoded", len(words) * width, "u1")
            layout.group(words, number, part)
            size = len(self._frames.compress(part))
            shrinks.append(size < (1 - _MIN_GAIN) * len(part))
            left += min(size, len(part))
        chosen = copy.copy(self)
        chosen._layout, chosen._tried = layout, tuple(shrinks)  # noqa: SLF001 - it is a copy of this object
        return chosen, left / len(sample)

    def encode_block(self, block: memoryview, dtype: str) -> memoryview:
        """Split a block into groups, and compress the groups that become smaller."""
        layout = self._layout or _Layout.of(dtype)
        words: Words = np.frombuffer(block, layout.word)
        raw = [len(words) * width for _, width in layout.groups]
        start = _HEAD.size + 4 * len(raw)
        encoded: npt.NDArray[np.uint8] = _scratch.take("encoded", start + sum(raw), "u1")
        lengths: list[int] = []
        position = start
        for number, (tried, size) in enumerate(zip(self._tried or (True,) * len(raw), raw, strict=True)):
            # Where it does not shrink it is in place already.
            place = encoded[position : position + size]
            layout.group(words, number, place)
            if tried and len(frame := self._frames.compress(place)) < (1 - _MIN_GAIN) * size:
                size = len(frame)
                place[:size] = np.frombuffer(frame, np.uint8)
            lengths.append(size)
            position += size
        head = _HEAD.pack(layout.byte, len(block)) + struct.pack(f"<{len(raw)}I", *lengths)
        encoded[:start] = np.frombuffer(head, np.uint8)
        return encoded[:position].data

    def decoded_bytes(self, data: memoryview) -> int:
        """Return the decoded length in bytes from the header."""
        layout, size, lengths, start = _head(data)
        raw = [size // layout.item_bytes * width for _, width in layout.groups]
        if size % layout.item_bytes or start + sum(lengths) != len(data):
            raise ValueError("the groups of bytes do not fill the block")
        if any(length > full for length, full in zip(lengths, raw, strict=True)):
            raise ValueError("a group of bytes is longer than the elements have")
        return size

    def decode_block(self, data: memoryview, into: memoryview) -> None:
        """Decompress and join a block's groups into the buffer `into`."""
        layout, size, lengths, position = _head(data)
        count = size // layout.item_bytes
        words, group = (_scratch.take(name, count, layout.word) for name in ("words", "group"))
        for number, ((first, width), length) in enumerate(zip(layout.groups, lengths, strict=True)):
            part: memoryview | bytes = data[position : position + length]
            position += length
            if length != count * width:
                part = decompress(memoryview(part), count * width)
            plane = np.frombuffer(part, _UNSIGNED[width])
            if number == 0:
                np.copyto(words, plane)
            else:
                np.copyto(group, plane)
                np.left_shift(group, 8 * first, out=group)
                np.bitwise_or(words, group, out=words)
        target = np.frombuffer(into, layout.word)
        if layout.rotated:
            np.right_shift(words, 1, out=target)
            np.left_shift(words, 8 * layout.item_bytes - 1, out=words)
            np.bitwise_or(target, words, out=target)
        else:
            target[:] = words


class _Scratch(threading.local):
    """Memory of a thread: allocating it per block would cost as much as the work itself."""

    def __init__(self) -> None:
        self._memory: dict[str, npt.NDArray[np.uint8]] = {}
        self._views: dict[tuple[str, int, Any], Any] = {}

    def take(self, name: str, count: int, dtype: Any) -> Any:
        """Return uninitialised elements, valid until the next call with this name."""
        view = self._views.get((name, count, dtype))
        if view is None:
            view = self._view(name, count, dtype)
        return view

    def _view(self, name: str, count: int, dtype: Any) -> Any:
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        nbytes = count * np.dtype(dtype).itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < nbytes:
            memory = self._memory[name] = np.empty(nbytes, np.uint8)
            self._views = {key: view for key, view in self._views.items() if key[0] != name}
        view = self._views[name, count, dtype] = memory[:nbytes].view(dtype)
        return view


_scratch = _Scratch()


def _head(data: memoryview) -> tuple[_Layout, int, tuple[int, ...], int]:
    if len(data) < _HEAD.size:
        raise ValueError("the block is cut short")
    byte, size = _HEAD.unpack_from(data)
    layout = _Layout.from_byte(byte)
    count = len(layout.groups)
    start = _HEAD.size + 4 * count
    if len(data) < start:
        raise ValueError("the block is cut short")
    return layout, size, struct.unpack_from(f"<{count}I", data, _HEAD.size), start
