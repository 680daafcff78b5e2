"""Tree of dotted names as lines, without recursion, since a name may have any number of parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dcp_inspect.printing.output import Cell, count_bytes

# Most guides before a name: no screen is wide enough for more, so deeper values get their whole remaining name.
_MAX_LEVELS = 16


@dataclass(slots=True, eq=False)
class _Level:
    count: int = 0
    bytes: int = 0
    below: list[tuple[str, _Level | str]] = field(default_factory=list)
    levels: dict[str, _Level] = field(default_factory=dict)
    """A value may have the same name as a level."""

    def child(self, name: str) -> _Level:
        found = self.levels.get(name)
        if found is None:
            found = self.levels[name] = _Level()
            self.below.append((name, found))
        return found


def tree_lines(values: Iterable[tuple[str, int, str]], depth: int | None = None) -> Iterator[list[Cell]]:
    """Yield a tree's lines; levels below `depth` are summed up."""
    waiting = [_entries(_grown(values), "", 0)]
    while waiting:
        entry = next(waiting[-1], None)
        if entry is None:
            waiting.pop()
            continue
        name, value, first, rest = entry
        level = len(waiting)
        if isinstance(value, str):
            yield [first, (name, "bold"), f"  {value}"]
            continue
        count = f"{value.count} value{'s' * (value.count != 1)}"
        yield [first, (name, "bold cyan"), (f"  {count}, {count_bytes(value.bytes)}", "dim")]
        if depth is None or level < depth:
            waiting.append(_entries(value, rest, level))


def _grown(values: Iterable[tuple[str, int, str]]) -> _Level:
    root = _Level()
    for name, size, form in values:
        place, path = root, [root]
        *above, last = name.split(".")
        for part in above:
            place = place.child(part)
            path.append(place)
        for each in path:
            each.count, each.bytes = each.count + 1, each.bytes + size
        place.below.append((last, form))
    return root


def _entries(level: _Level, guides: str, above: int) -> Iterator[tuple[str, _Level | str, str, str]]:
    found = _flat(level) if above >= _MAX_LEVELS else (_joined(*each) for each in level.below)
    following = next(found, None)
    while following is not None:
        (name, value), following = following, next(found, None)
        first, rest = ("├── ", "│   ") if following is not None else ("└── ", "    ")
        yield name, value, guides + first if above else "", guides + rest if above else ""


def _joined(name: str, value: _Level | str) -> tuple[str, _Level | str]:
    names = [name]
    while isinstance(value, _Level) and len(value.below) == 1:
        ((below, value),) = value.below
        names.append(below)
    return ".".join(names), value


def _flat(level: _Level) -> Iterator[tuple[str, str]]:
    waiting: list[tuple[tuple[str, ...], Iterator[tuple[str, _Level | str]]]] = [((), iter(level.below))]
    while waiting:
        names, entries = waiting[-1]
        entry = next(entries, None)
        if entry is None:
            waiting.pop()
        elif isinstance(entry[1], str):
            yield ".".join((*names, entry[0])), entry[1]
        else:
            waiting.append(((*names, entry[0]), iter(entry[1].below)))
