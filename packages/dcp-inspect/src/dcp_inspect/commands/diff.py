"""`dcp diff`: compare names, shapes and values of two checkpoints or files of any formats."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click

from dcp_hooks import report_operation
from dcp_inspect.exit_codes import DIFFERENT
from dcp_inspect.places import PLACE
from dcp_inspect.printing.output import Cell, json_option, print_json, print_line, print_table
from dcp_inspect.values import open_values

__all__ = ["command"]

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: a name and the property that differs."""

    name: str
    what: str
    """Differing property: `only in A`, `only in B`, `dtype`, `shape`, `kind` or `values`."""
    a: str = ""
    b: str = ""
    max_abs: float | None = None
    """Largest absolute difference of two values; infinite if one is not finite where the other is."""
    max_rel: float | None = None
    """Largest relative difference |a - b| / |b|; infinite where b is 0."""
    different: int | None = None
    """Number of elements that differ: in any bit, unless a tolerance was given."""


@click.command("diff")
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option("--keys-only", is_flag=True, help="Compare names, dtypes and shapes; read no values.")
@click.option("--atol", type=float, default=0.0, show_default=True, help="Absolute difference that counts as equal.")
@click.option(
    "--rtol", type=float, default=0.0, show_default=True, help="Difference relative to B that counts as equal."
)
@json_option
def command(a: str, b: str, keys_only: bool, atol: float, rtol: float, as_json: bool) -> int:
    """Compare two checkpoints or files. Ends with 1 if they differ."""
    one, other = open_values(a), open_values(b)
    with report_operation("compare", b) as tick:
        tick.expect(0 if keys_only else one.nbytes)
        found = [*_compare(one, other, keys_only=keys_only, atol=atol, rtol=rtol, tick=tick)]
    count = len(_names(one) | _names(other))
    one.close()
    other.close()
    if as_json:
        print_json(
            {"a": a, "b": b, "equal": not found, "values": count, "differences": [asdict(each) for each in found]}
        )
    else:
        _print(found, count)
    return DIFFERENT if found else 0


def _names(content: Any) -> set[str]:
    return {*content.tensors, *content.objects, *content.aliases}


def _compare(
    one: Any, other: Any, *, keys_only: bool, atol: float, rtol: float, tick: Callable[[int], None]
) -> Iterator[Difference]:
    mine, theirs = _names(one), _names(other)
    for name in sorted(mine | theirs):
        if name not in theirs or name not in mine:
            yield Difference(name, "only in A" if name in mine else "only in B")
            continue
        kinds = ["object" if name in content.objects else "tensor" for content in (one, other)]
        if kinds[0] != kinds[1]:
            yield Difference(name, "kind", kinds[0], kinds[1])
        elif kinds[0] == "object":
            if not keys_only:
                yield from _objects(name, one.objects[name](), other.objects[name]())
        else:
            yield from _tensors(name, _entry(one, name), _entry(other, name), keys_only, atol, rtol, tick)


def _entry(content: Any, name: str) -> Any:
    return content.tensors[content.aliases.get(name, name)]


def _objects(name: str, a: bytes, b: bytes) -> Iterator[Difference]:
    """Compare two objects by type and bits: 0.0 is not -0.0, 1 is neither True nor 1.0, NaN equals itself."""
    if a == b:
        return
    load = importlib.import_module("dcp_core.objects.object_bytes").load_object
    left, right = load(a, key=name), load(b, key=name)
    if not importlib.import_module("dcp_core.planning.comparable_bytes").same_value(left, right):
        yield Difference(name, "values", repr(left)[:60], repr(right)[:60])


def _tensors(
    name: str, a: Any, b: Any, keys_only: bool, atol: float, rtol: float, tick: Callable[[int], None]
) -> Iterator[Difference]:
    if a.shape != b.shape:
        yield Difference(name, "shape", str(a.shape), str(b.shape))
        return
    if a.dtype != b.dtype:
        yield Difference(name, "dtype", a.dtype, b.dtype)
    if keys_only:
        return
    measured = _Measured(atol, rtol)
    for left, right in _aligned(a, b):
        measured.add(left, right)
        tick(left.numel() * left.element_size())
    if measured.different:
        yield Difference(
            name, "values", max_abs=measured.max_abs, max_rel=measured.max_rel, different=measured.different
        )


def _aligned(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the elements of two tensors of one shape, in pieces of equal length."""
    streams = [_elements(entry) for entry in (a, b)]
    held: list[Any] = [None, None]
    while True:
        for side in (0, 1):
            if held[side] is None or not held[side].numel():
                held[side] = next(streams[side], None)
        if held[0] is None or held[1] is None:
            return
        count = min(held[0].numel(), held[1].numel())
        yield held[0][:count], held[1][:count]
        held = [each[count:] for each in held]


def _elements(entry: Any) -> Iterator[Any]:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, entry.dtype)
    for piece in entry.data.pieces(_PIECE_BYTES):
        yield torch.frombuffer(piece, dtype=torch.uint8).view(dtype)


class _Measured:
    """Running totals of the differences between two tensors."""

    def __init__(self, atol: float, rtol: float) -> None:
        self._atol, self._rtol = atol, rtol
        self.different = 0
        self.max_abs = self.max_rel = 0.0

    def add(self, a: Any, b: Any) -> None:
        """Compare two runs of elements: by bits; with a tolerance or between dtypes, by value, where NaN equals NaN."""
        torch = importlib.import_module("torch")
        bits = None
        if a.dtype == b.dtype:
            bits = (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, a.element_size()).any(1)
            if not bits.any():
                return
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        exact = not (a.is_floating_point() or b.is_floating_point() or a.is_complex() or b.is_complex())
        same = (a == b) if exact else None
        a, b = a.to(wide), b.to(wide)
        gap = (a - b).abs()
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(gap), gap)
        gap = torch.where(gap.isnan(), torch.full_like(gap, math.inf), gap)
        differs = gap > self._atol + self._rtol * b.abs().nan_to_num(0.0, 0.0, 0.0)
        if bits is not None and not (self._atol or self._rtol):
            differs = bits
        elif same is not None:  # beyond 2⁵³ neighbouring integers look equal as floats
            differs |= ~same & (gap == 0)
        if differs.any():
            self.different += int(differs.sum())
            self.max_abs = max(self.max_abs, float(gap.max()))
            self.max_rel = max(self.max_rel, float((gap[differs] / b[differs].abs()).nan_to_num(0.0, math.inf).max()))


def _print(found: list[Difference], count: int) -> None:
    if not found:
        print_line(("equal", "green"), f": {count} values")
        return
    columns = ("name", "differs in", "A", "B", "elements", "max abs", "max rel")
    print_table(columns, map(_row, found), right=columns[4:])
    names = len({each.name for each in found})
    print_line(f"{names} of {count} values differ")


def _row(each: Difference) -> tuple[Cell, ...]:
    numbers = ["" if value is None else f"{value:.4g}" for value in (each.max_abs, each.max_rel)]
    elements = "" if each.different is None else str(each.different)
    return each.name, (each.what, "red"), each.a, each.b, elements, *numbers
