"""The header of a safetensors file: strict reading, and building.

Source: the format's description in the README of huggingface/safetensors 0.8 (8 bytes of length, JSON, data).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dcp_core.errors import CorruptCheckpointError, UnsupportedFormatError, UnsupportedValueError
from dcp_io import Source
from dcp_manifest.index.dtypes import ITEM_BYTES

_MAX_HEADER_BYTES = 100_000_000
_ALIGNMENT_BYTES = 8
_MAX_NUMBER = (1 << 63) - 1
_METADATA = "__metadata__"
MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a tensor."""

CODES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
        "float4_e2m1fn_x2": "F4",
    }
)
"""Name of a torch dtype → name in safetensors files."""
_DTYPES = {code: dtype for dtype, code in CODES.items()}
_PACKED = "float4_e2m1fn_x2"


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """Header entry of one tensor; `start` and `stop` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """Parsed header of a safetensors file."""

    entries: tuple[HeaderEntry, ...]
    """In the order of their data in the file."""
    metadata: Mapping[str, str]
    bytes: int
    """Length of the header with its length field; equals the offset of the data."""


def code_of(dtype: str, key: str) -> str:
    """Return the name of a dtype in safetensors files. Raises UnsupportedValueError if they lack it."""
    if dtype not in CODES:
        raise UnsupportedValueError(
            f"{key!r} has dtype {dtype}, which safetensors cannot hold; convert it (dtype=…), or leave it out"
        )
    return CODES[dtype]


def build_header(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Build the beginning of a file: length and text of the header, for data in the same order without gaps.

    Raises UnsupportedValueError if safetensors lacks the dtype, cannot hold a name, or readers refuse the length.
    """
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        if name == _METADATA:
            raise UnsupportedValueError(f"a tensor named {name!r} cannot be in a safetensors file; rename it")
        size = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else 0
        code = code_of(dtype, name)
        logical = (*shape[:-1], shape[-1] * 2) if dtype == _PACKED and shape else shape
        table[name] = {"dtype": code, "shape": list(logical), "data_offsets": [position, position + size]}
        position += size
    try:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UnsupportedValueError(
            f"{_not_text(table)!r} is no text that UTF-8 can hold, as safetensors need it; rename it"
        ) from error
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > _MAX_HEADER_BYTES:
        raise UnsupportedValueError(f"{len(tensors)} tensors need a header of {len(text)} bytes; use more files")
    return len(text).to_bytes(8, "little") + text


def _not_text(table: Mapping[str, Any]) -> str:
    pairs = table.get(_METADATA, {}).items()
    texts: list[str] = [*table, *(text for pair in pairs for text in pair)]
    return next(text for text in texts if re.search("[\ud800-\udfff]", text))


def read_header(source: Source, *, file: str) -> Header:
    """Read the header of a file, and check that it describes every byte exactly once.

    Raises CorruptCheckpointError, or UnsupportedFormatError for an unknown dtype.
    """
    size = source.size()
    if size < 8:
        raise CorruptCheckpointError(f"a file of {size} bytes is no safetensors file", file=file)
    length = int.from_bytes(_read(source, 0, 8), "little")
    if length > _MAX_HEADER_BYTES or 8 + length > size:
        raise CorruptCheckpointError(
            f"the header should have {length} bytes and the file has {size}: it is truncated or no safetensors file",
            file=file,
        )
    try:
        table = json.loads(_read(source, 8, length).decode("utf-8"), object_pairs_hook=_unique)
        metadata = _metadata(table.pop(_METADATA, None) or {})
        entries = [_entry(name, record, 8 + length, file) for name, record in table.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, (CorruptCheckpointError, UnsupportedFormatError)):
            raise
        raise CorruptCheckpointError(f"the header is damaged: {error}", file=file) from error
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_tiling(entries, 8 + length, size, file)
    return Header(tuple(entries), metadata, 8 + length)


def _read(source: Source, offset: int, length: int) -> bytes:
    data = bytearray(length)
    source.read_into(offset, [memoryview(data)])
    return bytes(data)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise TypeError("__metadata__ holds other values than strings")
    return value


def _entry(name: str, record: Any, base: int, file: str) -> HeaderEntry:
    code, shape, (start, stop) = record["dtype"], record["shape"], record["data_offsets"]
    numbers = [*shape, start, stop]
    if not all(type(number) is int and 0 <= number <= _MAX_NUMBER for number in numbers):
        raise ValueError(f"{name!r} has a size or offset that is no natural number below 2⁶³")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{name!r} has {len(shape)} dimensions; {MAX_DIMENSIONS} are possible")
    if code not in _DTYPES:
        raise UnsupportedFormatError(
            f"{file}: {name!r} has the dtype {code!r}, which this version does not know; use a newer dcp-format"
        )
    dtype = _DTYPES[code]
    if dtype == _PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name!r} has an odd number of packed elements")
        shape = [*shape[:-1], shape[-1] // 2]
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r} of {code} and shape {shape} does not fit its {stop - start} bytes")
    return HeaderEntry(name, dtype, tuple(shape), base + start, base + stop)


def _check_tiling(entries: Sequence[HeaderEntry], base: int, size: int, file: str) -> None:
    position = base
    for entry in entries:
        if entry.start != position:
            raise CorruptCheckpointError(
                f"the data of {entry.name!r} begins at byte {entry.start}, not {position}: ranges overlap or leave "
                "holes",
                file=file,
                key=entry.name,
            )
        position = entry.stop
    if position != size:
        raise CorruptCheckpointError(
            f"the file has {size} bytes and its header describes {position}: it is truncated or damaged", file=file
        )
