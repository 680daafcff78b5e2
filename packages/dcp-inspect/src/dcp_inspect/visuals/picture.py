"""SVG pictures: a layout (a bar per data file), shards' holders (a box per tensor), a timeline (a bar per rank)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape as escape_markup

from dcp_base.escaping import printable
from dcp_inspect.layout import RankLoad, Segment
from dcp_inspect.printing.output import count_bytes

_WIDTH, _LEFT, _BAR, _GAP = 960, 230, 18, 8
_MAX_FILES, _MAX_RANKS = 48, 64
_TENSOR, _NAME_LETTERS = 34, 44
EACH = "each rank"


def draw(title: str, files: Mapping[str, int], segments: Sequence[Segment], ranks: Sequence[RankLoad]) -> str:
    """Draw a layout as SVG, with a legend of ranks."""
    by_file: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        by_file[segment.file].append(segment)
    names = sorted(files)[:_MAX_FILES]
    longest = max((files[name] for name in names), default=1) or 1
    scale = (_WIDTH - _LEFT - 20) / longest
    lines = [f'<text x="12" y="24" class="t">{_escape(title)}</text>']
    y = 44
    for name in names:
        lines += _bar(name, files[name], by_file[name], y, scale, len(ranks))
        y += _BAR + _GAP
    if len(files) > len(names):
        more = len(files) - len(names)
        lines.append(f'<text x="12" y="{y + 12}">and {more} more file{"s" * (more != 1)}</text>')
        y += _BAR
    texts = [f"rank {load.rank}: reads {count_bytes(load.read_bytes)}" for load in ranks]
    return _framed(lines, texts, y + 14)


def _framed(lines: Sequence[str], legend: Sequence[str], y: int) -> str:
    lines = [*lines]
    for rank, text in enumerate(legend[:_MAX_RANKS]):
        x, row = 12 + 235 * (rank % 4), y + 20 * (rank // 4)
        lines.append(f'<rect x="{x}" y="{row}" width="12" height="12" fill="{_colour(rank, len(legend))}"/>')
        lines.append(f'<text x="{x + 18}" y="{row + 11}">{text}</text>')
    height = y + 20 * -(-min(len(legend), _MAX_RANKS) // 4) + 12
    style = "text{font:12px sans-serif;fill:#222}.t{font:bold 14px sans-serif}"
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


@dataclass(slots=True)
class Row:
    """A tensor to draw."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    boxes: Mapping[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]
    """Offsets and sizes → ranks; none if unknown, or if each rank has its own box."""
    others: int = 0
    """Number of similar tensors that it stands for."""


def draw_holders(title: str, rows: Sequence[Row], *, alone: str, world_size: int = 1) -> str:
    """Draw the tensors' holders as SVG; `alone` is the text for boxes without ranks."""
    ranks = max((rank + 1 for row in rows for holders in row.boxes.values() for rank in holders), default=0)
    ranks = max(ranks, world_size)
    held = [0] * ranks
    for row in rows:
        for (_, sizes), holders in row.boxes.items():
            for rank in holders or (range(ranks) if alone == EACH else ()):
                held[rank] += math.prod(sizes) * row.item_bytes * (1 + row.others)
    lines, y = [f'<text x="12" y="24" class="t">{_escape(title)}</text>'], 40
    for row in rows[:_MAX_FILES]:
        lines += _tensor(row, y, ranks, alone)
        y += _TENSOR + _GAP
    if len(rows) > _MAX_FILES:
        lines.append(f'<text x="12" y="{y + 12}">and {len(rows) - _MAX_FILES:,} more kinds of tensors</text>')
        y += _BAR
    return _framed(lines, [f"rank {rank}: {count_bytes(size)}" for rank, size in enumerate(held)], y + 8)


def draw_timeline(
    title: str, phases: Sequence[str], rows: Sequence[tuple[str, Mapping[str, tuple[float, float]]]]
) -> str:
    """Draw rows, each a label and its phases' start and end in seconds, as SVG."""
    longest = max((end for _, spans in rows for _, end in spans.values()), default=0.0) or 1.0
    lines, y, scale = [f'<text x="12" y="24" class="t">{_escape(title)}</text>'], 44, (_WIDTH - _LEFT - 20) / longest
    for label, spans in rows:
        lines.append(f'<text x="12" y="{y + 13}">{_escape(label)}</text>')
        for phase, (start, end) in spans.items():
            lines.append(
                f'<rect x="{_LEFT + start * scale:.2f}" y="{y}" width="{max(0.3, (end - start) * scale):.2f}" '
                f'height="{_BAR}" fill="{_colour(phases.index(phase), len(phases))}">'
                f"<title>{_escape(f'{label}, {phase}: {start:.3g} s to {end:.3g} s')}</title></rect>"
            )
        y += _BAR + _GAP
    for part in range(5):
        x = _LEFT + part / 4 * (_WIDTH - _LEFT - 60)
        lines.append(f'<text x="{x:.0f}" y="{y + 12}">{longest * part / 4:.3g} s</text>')
    return _framed(lines, phases, y + 26)


def _tensor(row: Row, y: int, ranks: int, alone: str) -> list[str]:
    size = count_bytes(math.prod(row.shape) * row.item_bytes)
    many = f"{1 + row.others} × " if row.others else ""
    name = row.name if len(row.name) <= _NAME_LETTERS else f"…{row.name[1 - _NAME_LETTERS :]}"
    copies = max(map(len, row.boxes.values()), default=0)
    facts = f"{many}{row.dtype} {list(row.shape)}, {size}{f', on {copies} ranks' if copies > 1 else ''}"
    lines = [f'<text x="12" y="{y + 13}">{_escape(name)}</text>', f'<text x="12" y="{y + 28}">{_escape(facts)}</text>']
    left, width = _LEFT + 90, _WIDTH - _LEFT - 110
    lines.append(f'<rect x="{left}" y="{y}" width="{width}" height="{_TENSOR}" fill="#e8e8e8"/>')
    cut = [dim for dim in range(len(row.shape)) if any(sizes[dim] < row.shape[dim] for _, sizes in row.boxes)]
    for (offsets, sizes), holders in row.boxes.items():
        spans = [(offsets[dim] / row.shape[dim], sizes[dim] / row.shape[dim]) for dim in cut[:2] if row.shape[dim]]
        (at, share), (down, height) = [*spans, (0.0, 1.0), (0.0, 1.0)][:2]
        for number, rank in enumerate(holders or (None,)):
            lane = height * _TENSOR / max(1, len(holders))
            who = alone if rank is None else f"rank {rank}"
            what = f"{row.name}{list(offsets)} + {list(sizes)}: {who}"
            colour = "#b9bec4" if rank is None else _colour(rank, ranks)
            lines.append(
                f'<rect x="{left + at * width:.2f}" y="{y + down * _TENSOR + number * lane:.2f}" '
                f'width="{max(0.3, share * width):.2f}" height="{lane:.2f}" fill="{colour}" stroke="#fff" '
                f'stroke-width="0.5"><title>{_escape(what)}</title></rect>'
            )
            if rank is None:
                lines.append(f'<text x="{left + 8}" y="{y + _TENSOR / 2 + 4}">{_escape(alone)}</text>')
    return lines


def page(title: str, picture: str) -> str:
    """Return the picture as an HTML page."""
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>{_escape(title)}</title>\n{picture}'


def _bar(name: str, size: int, segments: Sequence[Segment], y: int, scale: float, world_size: int) -> list[str]:
    label = f"{name if len(name) <= 24 else name[:21] + '…'}  {count_bytes(size)}"
    lines = [f'<text x="12" y="{y + 13}">{_escape(label)}</text>']
    lines.append(f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, size * scale):.2f}" height="{_BAR}" fill="#e8e8e8"/>')
    # Several ranks may read the same bytes: each has its own lane there.
    spans: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        spans[segment.start, segment.stop].append(segment)
    for (start, stop), readers in sorted(spans.items()):
        lane = _BAR / len(readers)
        for number, segment in enumerate(readers):
            what = f"{segment.name}: rank {segment.rank}, {count_bytes(stop - start)}"
            lines.append(
                f'<rect x="{_LEFT + start * scale:.2f}" y="{y + number * lane:.2f}" '
                f'width="{max(0.3, (stop - start) * scale):.2f}" height="{lane:.2f}" '
                f'fill="{_colour(segment.rank, world_size)}"><title>{_escape(what)}</title></rect>'
            )
    return lines


def _colour(rank: int, world_size: int) -> str:
    return f"hsl({round(360 * rank / max(world_size, 1))},65%,{45 if rank % 2 else 60}%)"


def _escape(text: str) -> str:
    return escape_markup(printable(text))
