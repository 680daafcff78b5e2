"""The bytes of a case's tensors: the same in every process, without a random number per byte.

Floats look like weights, N(0, 0.02), for the libraries that compress.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ITEM_BYTES", "TensorSpec", "checksum", "fill", "poison", "read_specs", "zero"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int64": 8}
_NOISE_VALUES = 4_194_301  # a prime, so that tensors that start elsewhere in the noise do not repeat each other
_POISON = 0xA5


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a case: where its values come from, and along which dimension ranks share it (None: plain)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str | None = None
    file_offset: int = 0
    shard: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_specs(rows: Iterable[dict[str, Any]]) -> list[TensorSpec]:
    """Specs from JSON."""
    return [TensorSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows]


def fill(specs: Iterable[tuple[TensorSpec, Bytes]], *, seed: int) -> None:
    """Write the values of whole tensors into their memory."""
    noise = np.random.default_rng(seed).standard_normal(_NOISE_VALUES, np.float32) * np.float32(0.02)
    sources = {
        "float32": noise.view(np.uint8),
        "bfloat16": np.ascontiguousarray(noise.view(np.uint16)[1::2]).view(np.uint8),  # the upper half of each float32
        "int64": np.arange(_NOISE_VALUES).view(np.uint8),
    }
    for spec, memory in specs:
        if spec.file is not None:
            memory[:] = np.fromfile(Path(spec.file), np.uint8, spec.nbytes, offset=spec.file_offset)
            continue
        source = sources[spec.dtype]
        start = zlib.crc32(spec.name.encode()) % _NOISE_VALUES * ITEM_BYTES[spec.dtype]
        for at, piece in _pieces(source, start, len(memory)):
            memory[at : at + len(piece)] = piece


def _pieces(source: Bytes, start: int, length: int) -> Iterator[tuple[int, Bytes]]:
    at = 0
    while at < length:
        piece = source[start : start + length - at]
        yield at, piece
        at, start = at + len(piece), 0


def zero(memories: Iterable[Bytes]) -> None:
    """Forget all values, so that a load must bring them back."""
    for memory in memories:
        memory[:] = 0


def poison(memories: Iterable[Bytes]) -> None:
    """Spoil the first and the last byte of every tensor; cheap enough to do before each load."""
    for memory in memories:
        memory[:1] ^= _POISON
        memory[-1:] ^= _POISON


def checksum(memories: Iterable[Bytes]) -> list[int]:
    """CRC32 of each tensor."""
    return [zlib.crc32(memory.data) for memory in memories]
