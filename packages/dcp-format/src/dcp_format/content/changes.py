"""Changes during a conversion: selection, renaming and casts."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from dcp_core.errors import MissingKeyError, UnsupportedValueError
from dcp_core.planning.load_report import suggest
from dcp_core.state_dict.flatten import KeyMap
from dcp_core.tensors.tensor_memory import tensor_bytes
from dcp_format.content.content import Content, TensorEntry
from dcp_io import PiecewiseData

# Dtypes whose elements have several numbers each, which torch does not cast.
_PACKED = frozenset({torch.float4_e2m1fn_x2})

V = TypeVar("V")


def select_values(content: Content, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Content:
    """Return the values that match a pattern in `include` and no pattern in `exclude`.

    Raises MissingKeyError if a pattern of `include` matches no name, or nothing is left.
    """
    names = [*content.tensors, *content.objects, *content.aliases]
    for pattern in include:
        if not fnmatch.filter(names, pattern):
            meant = _meant(pattern, names)
            raise MissingKeyError(
                f"include={pattern!r} matches no value in {content.url}{meant or ';'} `dcp show` lists the names"
            )
    wanted = {
        name
        for name in names
        if (not include or any(fnmatch.fnmatchcase(name, pattern) for pattern in include))
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)
    }
    if names and not wanted:
        raise MissingKeyError(f"exclude leaves nothing of the {len(names)} values in {content.url} to convert")
    tensors = {name: entry for name, entry in content.tensors.items() if name in wanted}
    aliases: dict[str, str] = {}
    heirs: dict[str, str] = {}
    for alias, target in content.aliases.items():
        if alias not in wanted:
            continue
        if target in tensors or target in heirs:
            aliases[alias] = heirs.get(target, target)
        else:  # the first of its names that stays becomes the tensor
            heirs[target] = alias
            tensors[alias] = replace(content.tensors[target], name=alias)
    objects = {name: read for name, read in content.objects.items() if name in wanted}
    paths = content.paths
    if paths is not None and len(wanted) < len(names):
        paths = {name: path for name, path in paths.items() if name in wanted}
    return replace(content, tensors=tensors, objects=objects, aliases=aliases, paths=paths)


def _meant(pattern: str, names: Sequence[str]) -> str:
    if any(name.startswith(f"{pattern}.") for name in names):
        return f"; did you mean {f'{pattern}.*'!r}, for all values below it?"
    return suggest(pattern, names)


def rename_values(
    content: Content, rename: Mapping[str, str] | None = None, patterns: Sequence[tuple[str, str]] = ()
) -> Content:
    """Return the content with new names. A renamed value leaves its nested dict or list: its name is a key by itself.

    Raises UnsupportedValueError if two values would get the same name, MissingKeyError if `rename` has an unknown name.
    """
    names = KeyMap(rename, patterns)
    if not names:
        return content
    unused = names.unused([*content.tensors, *content.objects, *content.aliases])
    if unused:
        raise MissingKeyError(f"{content.url} has no value {unused[0]!r} to rename; `dcp show` lists the names")
    taken: dict[str, str] = {}

    def renamed(table: Mapping[str, V]) -> dict[str, V]:
        found = {}
        for name, value in table.items():
            new = names.stored(name)
            if new in taken:
                raise UnsupportedValueError(f"{taken[new]!r} and {name!r} would both be named {new!r}")
            taken[new] = name
            found[new] = value
        return found

    tensors = {name: replace(entry, name=name) for name, entry in renamed(content.tensors).items()}
    paths = content.paths
    if paths is not None:
        paths = {name: path for name, path in paths.items() if names.stored(name) == name}
    return replace(
        content,
        tensors=tensors,
        objects=renamed(content.objects),
        aliases={name: names.stored(target) for name, target in renamed(content.aliases).items()},
        paths=paths,
    )


def cast_tensors(content: Content, dtype: torch.dtype) -> Content:
    """Return the content with floating-point tensors cast to another dtype."""
    check_cast(dtype)
    name = str(dtype).removeprefix("torch.")
    tensors = {}
    for key, entry in content.tensors.items():
        old: torch.dtype = getattr(torch, entry.dtype)
        if cast_dtype(old, dtype) is not old:
            entry = TensorEntry(key, name, entry.shape, CastData(entry.data, old, dtype), entry.requires_grad)
        tensors[key] = entry
    return replace(content, tensors=tensors)


def check_cast(dtype: torch.dtype) -> None:
    """Raise TypeError or ValueError if floating-point tensors cannot be cast to `dtype`."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is no dtype: pass one such as torch.bfloat16")
    if not dtype.is_floating_point or dtype in _PACKED:
        raise ValueError(f"dtype={dtype}: tensors are cast to floating-point dtypes that are not packed")


def cast_dtype(old: torch.dtype, new: torch.dtype | None) -> torch.dtype:
    """Return the dtype that tensors of dtype `old` get; packed ones and integers keep theirs."""
    return old if new is None or not old.is_floating_point or old in _PACKED else new


class CastData:
    """A tensor's stream of bytes, cast to another dtype."""

    def __init__(self, data: PiecewiseData, old: torch.dtype, new: torch.dtype) -> None:
        self._data = data
        self._old = old
        self._new = new
        self.nbytes = data.nbytes // old.itemsize * new.itemsize

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the converted pieces; the source's pieces consist of whole elements."""
        share = max(1, self._new.itemsize // self._old.itemsize)
        for piece in self._data.pieces(max(1, max_bytes // (1 + share))):
            values = torch.frombuffer(piece, dtype=torch.uint8).view(self._old)
            yield tensor_bytes(values.to(self._new))
