"""One picture per case: who took how long, a panel for each place and kind of operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from integration_tests.benchmarks import tables
from integration_tests.benchmarks.contenders import FLOOR
from integration_tests.benchmarks.figures import Spread
from integration_tests.benchmarks.results import Results, RowResult

__all__ = ["draw"]

_OURS, _FLOOR, _OTHERS = "#0b6e4f", "#9a9a9a", "#5b7fa6"
Bar = tuple[str, Spread]


def draw(results: Results, folder: Path) -> dict[str, Path]:
    """Case → the picture that was written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for case in dict.fromkeys(row.case for row in results.rows):
        rows = [row for row in results.rows if row.case == case]
        found[case] = folder / f"benchmark-{case}.svg"
        _picture(rows, found[case])
    return found


def _picture(rows: Sequence[RowResult], path: Path) -> None:
    panels = [(row, kind, bars) for row in rows for kind in tables.KINDS if (bars := list(_bars(row, kind)))]
    heights = [len(bars) + 2 for _, _, bars in panels]
    with mpl.rc_context({"svg.hashsalt": "dcp", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 0.24 * sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axis, (row, kind, bars) in zip(axes, panels, strict=True):
            _panel(axis, bars)
            axis.set_title(f"{kind}: {row.place}, {'fsync' if row.fsync else 'no fsync'}", loc="left", fontsize=9)
        axes[-1].set_xlabel("seconds (median, least and most); less is better")
        figure.suptitle(rows[0].title)
        figure.savefig(path, metadata={"Date": None})


def _bars(row: RowResult, kind: str) -> Iterable[Bar]:
    for name, entry in row.entries.items():
        for variant, operation in tables.variants(entry, kind):
            seconds = entry.spread(operation)
            if seconds is not None:
                yield (f"{name}, {variant}" if variant else name), seconds


def _panel(axis: Any, bars: Sequence[Bar]) -> None:
    names = [name for name, _ in bars]
    medians = [found.median for _, found in bars]
    ends = [[f.median - f.low for _, f in bars], [f.high - f.median for _, f in bars]]
    colours = [_OURS if name.startswith("ours") else _FLOOR if name == FLOOR else _OTHERS for name in names]
    axis.barh(names, medians, xerr=ends, color=colours, error_kw={"elinewidth": 1, "capsize": 2})
    most = max(found.high for _, found in bars)
    for height, (_, found) in enumerate(bars):
        axis.text(found.high + most / 80, height, tables.number(found.median), va="center", fontsize=8)
    axis.set_xlim(0, most * 1.1)  # from zero, however far some are ahead: lengths are what eyes compare
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
