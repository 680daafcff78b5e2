"""SVG picture of a layout: a bar per data file, each part in the colour of the rank that reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape as escape_markup

from dcp_inspect.layout import RankLoad, Segment
from dcp_inspect.printing.output import count_bytes
from dcp_manifest import printable

__all__ = ["draw", "page"]

_WIDTH, _LEFT, _BAR, _GAP = 960, 230, 18, 8
_MAX_FILES = 48


def draw(title: str, files: Mapping[str, int], segments: Sequence[Segment], ranks: Sequence[RankLoad]) -> str:
    """Draw a layout as SVG.

    Args:
        title: Title of the picture.
        files: Name of a data file → its size in bytes.
        segments: Parts of the files that ranks read.
        ranks: Totals of the ranks, for the legend.
    """
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
        lines.append(f'<text x="12" y="{y + 12}">and {len(files) - len(names)} more files</text>')
        y += _BAR
    y += 14
    for load in ranks[:64]:
        x, row = 12 + 235 * (load.rank % 4), y + 20 * (load.rank // 4)
        text = f"rank {load.rank}: reads {count_bytes(load.read_bytes)}"
        lines.append(f'<rect x="{x}" y="{row}" width="12" height="12" fill="{_colour(load.rank, len(ranks))}"/>')
        lines.append(f'<text x="{x + 18}" y="{row + 11}">{text}</text>')
    height = y + 20 * -(-min(len(ranks), 64) // 4) + 12
    style = "text{font:12px sans-serif;fill:#222}.t{font:bold 14px sans-serif}"
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">\n'
        f'<style>{style}</style>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def page(title: str, picture: str) -> str:
    """Return the picture as an HTML page."""
    return f'<!doctype html>\n<meta charset="utf-8">\n<title>{_escape(title)}</title>\n{picture}'


def _bar(name: str, size: int, segments: Sequence[Segment], y: int, scale: float, world_size: int) -> list[str]:
    label = f"{name if len(name) <= 24 else name[:21] + '…'}  {count_bytes(size)}"
    lines = [f'<text x="12" y="{y + 13}">{_escape(label)}</text>']
    lines.append(f'<rect x="{_LEFT}" y="{y}" width="{max(1.0, size * scale):.2f}" height="{_BAR}" fill="#e8e8e8"/>')
    # Several ranks may read the same bytes: each has a lane of its own there.
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
    """Return a rank's colour: hues around the circle, neighbours in alternating lightness."""
    return f"hsl({round(360 * rank / max(world_size, 1))},65%,{45 if rank % 2 else 60}%)"


def _escape(text: str) -> str:
    """Escape text for XML; control characters, which XML forbids, are made printable."""
    return escape_markup(printable(text))
