"""`dcp diff`: compare two checkpoints or files of any formats."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from dcp_base import DcpError
from dcp_base.progress import report_operation
from dcp_inspect.arguments import PLACE
from dcp_inspect.errors import DIFFERENT, UNREADABLE, first_line, worst
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import Cell, json_option, print_json, print_line
from dcp_inspect.printing.table import print_table
from dcp_inspect.reading.values import Array, array_of, is_number, load_value, open_values, same_value, whole_array
from dcp_manifest import UnsafeCheckpointError, UnsupportedFormatError
from dcp_manifest.index.dtypes import ITEM_BYTES

_DAMAGED = "damaged"
_PIECE_BYTES = 16 << 20
_SHOWN_LETTERS = 60
_SAME_LETTERS = 20  # before the first that differs
Bits = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Difference:
    name: str
    what: str
    """`only in A`, `only in B`, `dtype`, `shape`, `kind`, `values`, or `damaged` if unknown."""
    a: str = ""
    b: str = ""
    max_abs: float | None = None
    """Infinite if only one of two values is finite."""
    max_rel: float | None = None
    """Largest |a - b| / |b|; infinite if b is 0."""
    different: int | None = None
    """Number of elements that differ in a bit, or beyond a tolerance."""


@click.command(
    "diff",
    epilog=examples(
        "dcp diff runs/step-100 runs/step-200",
        "dcp diff runs/step-100 model.safetensors --keys-only",
        "dcp diff runs/step-100 runs/step-200 --rtol 1e-5",
        "dcp diff s3://bucket/runs/step-100 s3://bucket/runs/step-200",
    ),
)
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option("--keys-only", is_flag=True, help="Compare names, dtypes and shapes; read no values.")
@click.option("--atol", type=float, default=0.0, show_default=True, help="Absolute difference that counts as equal.")
@click.option(
    "--rtol", type=float, default=0.0, show_default=True, help="Difference relative to B that counts as equal."
)
@json_option
def command(a: str, b: str, keys_only: bool, atol: float, rtol: float, as_json: bool) -> int:
    """Compare two checkpoints or files. Ends with 1 if they differ.

    A value that is damaged in one of them is listed as such, and makes the exit code 4; the others are compared.
    """
    one, other = open_values(a), open_values(b)
    with report_operation("compare", b) as tick:
        tick.expect(0 if keys_only else one.nbytes)
        sides = (_Side("A", a, one), _Side("B", b, other))
        found = [*_compare(*sides, keys_only=keys_only, atol=atol, rtol=rtol, tick=tick)]
    count = len(_names(one) | _names(other))
    one.close()
    other.close()
    if as_json:
        print_json(
            {"a": a, "b": b, "equal": not found, "values": count, "differences": [asdict(each) for each in found]}
        )
    else:
        _print(found, count, keys_only=keys_only)
    return worst(UNREADABLE if each.what == _DAMAGED else DIFFERENT for each in found)


def _names(content: Any) -> set[str]:
    return {*content.tensors, *content.objects, *content.aliases}


class _DamagedError(Exception):
    """Arguments: the letter of the unreadable side, and the message."""


@dataclass(frozen=True, slots=True)
class _Side:
    letter: str
    path: str
    content: Any

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except (DcpError, OSError) as error:
            if isinstance(error, UnsafeCheckpointError | UnsupportedFormatError):
                raise
            raise _DamagedError(self.letter, f"{self.path}: {first_line(error)}") from error

    def tensor(self, name: str) -> Any:
        return self.content.tensors[self.content.aliases.get(name, name)]

    def object(self, name: str) -> bytes:
        with self.reading():
            data: bytes = self.content.objects[name]()
            return data

    def elements(self, name: str) -> Iterator[Bits]:
        entry = self.tensor(name)
        pieces = iter(entry.data.pieces(_PIECE_BYTES))
        while True:
            with self.reading():
                piece = next(pieces, None)
            if piece is None:
                return
            yield np.frombuffer(piece, np.uint8).reshape(-1, ITEM_BYTES[entry.dtype])


def _compare(
    one: _Side, other: _Side, *, keys_only: bool, atol: float, rtol: float, tick: Callable[[int], None]
) -> Iterator[_Difference]:
    mine, theirs = _names(one.content), _names(other.content)
    for name in sorted(mine | theirs):
        if name not in theirs or name not in mine:
            yield _Difference(name, "only in A" if name in mine else "only in B")
            continue
        kinds = ["object" if name in side.content.objects else "tensor" for side in (one, other)]
        try:
            if kinds[0] != kinds[1]:
                yield _Difference(name, "kind", kinds[0], kinds[1])
            elif kinds[0] == "object":
                if not keys_only:
                    yield from _objects(name, one, other)
            else:
                yield from _tensors(name, one, other, keys_only, atol, rtol, tick)
        except _DamagedError as error:
            letter, message = error.args
            yield _Difference(name, _DAMAGED, *((message, "") if letter == "A" else ("", message)))


def _objects(name: str, one: _Side, other: _Side) -> Iterator[_Difference]:
    a, b = one.object(name), other.object(name)
    if a == b:
        return
    with one.reading():
        left = load_value(a, name)
    with other.reading():
        right = load_value(b, name)
    if not same_value(left, right):
        first, second = _excerpts(repr(left), repr(right))
        yield _Difference(name, "values", first, second)


def _excerpts(*texts: str) -> Iterator[str]:
    alike = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    same = sum(1 for _ in alike)
    start = max(0, same - _SAME_LETTERS) if max(map(len, texts)) > _SHOWN_LETTERS else 0
    for text in texts:
        end = start + _SHOWN_LETTERS
        yield f"{'…' if start else ''}{text[start:end]}{'…' if len(text) > end else ''}"


def _tensors(
    name: str, one: _Side, other: _Side, keys_only: bool, atol: float, rtol: float, tick: Callable[[int], None]
) -> Iterator[_Difference]:
    a, b = one.tensor(name), other.tensor(name)
    if a.shape != b.shape:
        yield _Difference(name, "shape", str(a.shape), str(b.shape))
        return
    if a.dtype != b.dtype:
        yield _Difference(name, "dtype", a.dtype, b.dtype)
    if keys_only:
        return
    measured = _Measured((a.dtype, b.dtype), atol, rtol)
    for left, right in _aligned(one.elements(name), other.elements(name)):
        measured.add(left, right)
        tick(left.nbytes)
    if measured.different:
        values = (_only_element(a), _only_element(b)) if math.prod(a.shape) == 1 else ("", "")
        yield _Difference(name, "values", *values, measured.max_abs, measured.max_rel, measured.different)


def _only_element(entry: Any) -> str:
    return str(whole_array(entry).reshape(-1)[0]) if is_number(entry.dtype) else ""


def _aligned(*streams: Iterator[Bits]) -> Iterator[tuple[Bits, Bits]]:
    held: list[Bits | None] = [None, None]
    while True:
        for side in (0, 1):
            some = held[side]
            if some is None or not len(some):
                held[side] = next(streams[side], None)
        one, other = held
        if one is None or other is None:
            return
        count = min(len(one), len(other))
        yield one[:count], other[:count]
        held = [one[count:], other[count:]]


class _Measured:
    def __init__(self, dtypes: tuple[str, str], atol: float, rtol: float) -> None:
        self._dtypes = dtypes
        self._atol, self._rtol = atol, rtol
        self.different = 0
        self.max_abs = self.max_rel = 0.0

    def add(self, left: Bits, right: Bits) -> None:
        """Compare bits, or with a tolerance or between dtypes, values, where NaN equals NaN."""
        bits = None
        if self._dtypes[0] == self._dtypes[1]:
            bits = (left != right).any(1)
            if not bits.any():
                return
        # Only the elements that differ in their bits can differ in their values.
        chosen = slice(None) if bits is None else bits
        a, b = (
            array_of(np.ascontiguousarray(side[chosen]).data.cast("B"), dtype)
            for side, dtype in zip((left, right), self._dtypes, strict=True)
        )
        with np.errstate(all="ignore"):
            self._add_values(a, b, exact=bits is not None and not (self._atol or self._rtol))

    def _add_values(self, a: Array, b: Array, *, exact: bool) -> None:
        wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        whole = a.dtype.kind in "biu" and b.dtype.kind in "biu"
        same = (a == b) if whole else None
        a, b = a.astype(wide), b.astype(wide)
        gap = np.abs(a - b)
        gap[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
        gap[np.isnan(gap)] = math.inf
        size = np.abs(b)
        differs = gap > self._atol + self._rtol * np.where(np.isfinite(size), size, 0)
        if exact:
            differs = np.ones_like(differs)
        elif same is not None:  # beyond 2⁵³ neighbouring integers look equal as floats
            differs |= ~same & (gap == 0)
        if differs.any():
            self.different += int(differs.sum())
            self.max_abs = max(self.max_abs, float(gap.max()))
            relative = gap[differs] / size[differs]
            relative[np.isnan(relative)] = 0
            self.max_rel = max(self.max_rel, float(relative.max()))


def _print(found: list[_Difference], count: int, *, keys_only: bool) -> None:
    if not found:
        compared = ", by name, dtype and shape" if keys_only else ""
        print_line(("equal", "green"), f": {count} value{'s' * (count != 1)}{compared}")
        return
    columns = ("name", "differs in", "A", "B", "elements", "max abs", "max rel")
    print_table(columns, map(_row, found), right=columns[4:], drop=("max rel", "elements"), wrap=("A", "B"))
    names = len({each.name for each in found})
    print_line(f"{names} of {count} value{'s' * (count != 1)} differ{'s' * (names == 1)}")


def _row(each: _Difference) -> tuple[Cell, ...]:
    numbers = ["" if value is None else f"{value:.4g}" for value in (each.max_abs, each.max_rel)]
    elements = "" if each.different is None else str(each.different)
    return each.name, (each.what, "red"), each.a, each.b, elements, *numbers
