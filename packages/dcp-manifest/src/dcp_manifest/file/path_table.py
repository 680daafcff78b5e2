"""Table of paths as columns; a path is the position of a value in the nested state dict.

The elements of a path, joined with `.`, usually are the name of the value. Then only the lengths of the elements
(except the last) and their kinds (key, list index, key that was an `int` or another literal) are stored. Otherwise the
joined text is stored too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import AnyStr, cast

import numpy as np
import numpy.typing as npt

from dcp_manifest.container.strings import decode_text, encode_text
from dcp_manifest.index.columns import PathElement
from dcp_manifest.index.literal_keys import LiteralKey

__all__ = ["PathColumns", "pack_paths", "unpack_paths"]

I64 = npt.NDArray[np.int64]
Path = tuple[PathElement, ...]

KEY, LIST_INDEX, INT_KEY, LITERAL_KEY = 0, 1, 2, 3
_INDEX = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_INDEX_LIMIT = 10**18
_KINDS: dict[type, int] = {str: KEY, int: LIST_INDEX}


@dataclass(frozen=True, slots=True)
class PathColumns:
    """Paths in the nested state dict of a list of names, as columns."""

    elements: I64
    """Number of elements of each path; 0 for a name without a path."""
    element_bytes: I64
    """Length of each path element in UTF-8 bytes; the last element of each path is left out."""
    kinds: I64
    """Kind of each element: key, list index, or literal key."""
    texts: list[str] | None
    """Elements of each path, joined with `.`; None if the joined text equals the name for every path."""


def pack_paths(names: Sequence[str], paths: dict[str, Path]) -> PathColumns:
    """Pack the paths of `names` into columns; a name that `paths` lacks gets a path of 0 elements.

    Raises:
        ValueError: An element is neither str nor int.
    """
    own = [paths.get(name, ()) for name in names]
    flat = list(chain.from_iterable(own))
    elements = np.fromiter(map(len, own), np.int64, len(own))
    kinds = _kinds(flat)
    parts = [str(part) for part in flat] if kinds.any() else cast(list[str], flat)
    if "".join(parts).isascii():
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
    else:
        lengths = np.fromiter((len(encode_text(part)) for part in parts), np.int64, len(parts))
    ends = np.cumsum(elements[elements > 0])
    texts = [".".join(map(str, path)) if path else name for name, path in zip(names, own, strict=True)]
    return PathColumns(elements, np.delete(lengths, ends - 1), kinds, None if texts == list(names) else texts)


def unpack_paths(names: Sequence[str], columns: PathColumns) -> dict[str, Path]:
    """Unpack the paths of `names` from columns; returns name → path.

    Raises:
        ValueError: The columns contradict each other or the texts.
    """
    texts = names if columns.texts is None else columns.texts
    if not len(columns.element_bytes) and not columns.kinds.any() and (columns.elements == 1).all():
        return {name: (text,) for name, text in zip(names, texts, strict=True)}
    lengths, kinds = columns.element_bytes.tolist(), columns.kinds.tolist()
    paths: dict[str, Path] = {}
    at_length = at_kind = 0
    for name, text, count in zip(names, texts, columns.elements.tolist(), strict=True):
        if count:
            parts = _split(text, lengths[at_length : at_length + count - 1])
            paths[name] = tuple(map(_element, parts, kinds[at_kind : at_kind + count]))
            at_length += count - 1
            at_kind += count
    return paths


def _kinds(flat: Sequence[PathElement]) -> I64:
    types = set(map(type, flat))
    if types <= {str}:
        return np.zeros(len(flat), np.int64)
    if any(type(part) is int and abs(part) >= _INDEX_LIMIT for part in flat):
        raise ValueError(f"a list index in a path is not below {_INDEX_LIMIT}")
    if not types <= {str, int, LiteralKey}:
        raise ValueError(f"a path may hold str and int, not {sorted(kind.__qualname__ for kind in types)}")
    return np.fromiter(map(_kind, flat), np.int64, len(flat))


def _kind(part: PathElement) -> int:
    if isinstance(part, LiteralKey):
        return INT_KEY if part.removeprefix("-").isdecimal() else LITERAL_KEY
    return _KINDS[type(part)]


def _split(text: str, lengths: list[int]) -> list[str]:
    if text.isascii():
        return _cut(text, lengths, ".")
    cut = _cut(encode_text(text), lengths, b".")
    return [decode_text(part) for part in cut]


def _cut(text: AnyStr, lengths: list[int], dot: AnyStr) -> list[AnyStr]:
    parts: list[AnyStr] = []
    start = 0
    for length in lengths:
        end = start + length
        if text[end : end + 1] != dot:
            raise ValueError(f"the path of {text!r} does not fit its text")
        parts.append(text[start:end])
        start = end + 1
    parts.append(text[start:])
    return parts


def _element(part: str, kind: int) -> PathElement:
    if kind == KEY:
        return part
    if kind == LIST_INDEX and _INDEX.fullmatch(part):
        return int(part)
    if kind in (INT_KEY, LITERAL_KEY):
        return LiteralKey(part)
    raise ValueError(f"the path element {part!r} is not of kind {kind}")
