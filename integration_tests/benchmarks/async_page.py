"""What the asynchronous benchmark found, as tables with bars, between the marks of `docs/async.md`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["bars", "tables", "write_page"]

BEGIN = "<!-- figures: python -m integration_tests.benchmarks.asynchronous -->"
END = "<!-- end of figures -->"
OURS, STOCK = "ours process", "stock process"

Figures = Mapping[str, Any]
BarRow = tuple[str, float | None, float]


def bars(figures: Figures) -> list[BarRow]:
    """What the process saver promises: name, what was found (None if it was not measured), and the most it may be."""
    beside, alone, many = (figures.get(part, {}) for part in ("beside training", "until it returns", "many saves"))
    ours, stock = beside.get(OURS, {}), beside.get(STOCK, {})
    return_ours, return_stock = alone.get(OURS, {}), alone.get(STOCK, {})
    return [
        ("until a save of 1 GiB returns ÷ one parallel memcpy", return_ours.get("returned of memcpy"), 1.3),
        ("lost training time ÷ duration of stock's save", ours.get("lost of the window"), 0.15),
        ("lost training time ÷ stock's (process)", _ratio(ours, stock, "lost"), 0.5),
        ("worst step above the median, ms", _times(ours.get("worst"), 1000), 50),
        ("duration of a save while training runs ÷ stock's (process)", _ratio(ours, stock, "save"), 1.0),
        ("first save ÷ stock's first", _ratio(return_ours, return_stock, "first save"), 1.0),
        ("first save after `warm_up` ÷ a later one", _within(return_ours, "first save, warm", "save"), 1.3),
        ("bytes of messages to the process per later save", return_ours.get("message bytes"), 1024),
        ("growth from save 40 to 200, trainer and process, MiB", many.get(OURS, {}).get("resident MiB"), 16),
        ("the same, descriptors", many.get(OURS, {}).get("descriptors"), 0),
    ]


def tables(figures: Figures) -> list[str]:
    """Lines of Markdown."""
    lines = ["| target | found | at most | |", "| --- | ---: | ---: | --- |"]
    for name, found, most in bars(figures):
        said = "not measured" if found is None else "met" if found <= most else "missed"
        lines.append(f"| {name} | {_number(found)} | {most:g} | {said} |")
    described = figures["described"]
    lines += ["", _sentence(described), ""]
    beside = {name: each for name, each in figures["beside training"].items() if isinstance(each, dict)}
    lines += _table(
        "while training runs, 2 ranks",
        beside,
        {
            "lost": "lost, s",
            "lost of the window": "lost ÷ stock's save",
            "worst": "worst step, s",
            "worst without": "worst step without a save, s",
            "blocked": "save blocks, s",
            "save": "save takes, s",
        },
    )
    lines += _table(
        "without training, 1 rank",
        figures["until it returns"],
        {
            "returned": "until it returns, s",
            "returned of memcpy": "÷ memcpy",
            "save": "save takes, s",
            "first save": "first save, s",
            "first save, warm": "after `warm_up`, s",
        },
    )
    lines += _table(
        "200 saves, save 40 to 200",
        figures["many saves"],
        {"resident MiB": "resident memory, MiB", "shared MiB": "shared, MiB", "descriptors": "descriptors"},
    )
    lines += ["| 10,000 tensors, 256 descriptors | |", "| --- | --- |"]
    lines += [f"| {name} | {told} |" for name, told in figures["few descriptors"].items()]
    return lines


def write_page(page: Path, figures: Figures) -> None:
    """Put the tables between the marks of a page.

    Raises:
        ValueError: The page lacks the marks.
    """
    text = page.read_text()
    head, found, rest = text.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"{page} does not have the marks {BEGIN} and {END}")
    page.write_text(head + found + "\n\n" + "\n".join(tables(figures)) + "\n\n" + ended + tail)


def _sentence(described: Mapping[str, Any]) -> str:
    machine = ", ".join(
        f"{name} {value}" if name == "Python" else value for name, value in described["machine"].items()
    )
    small, mib = described["tensors"], described["mib"]
    return (
        f"Medians of {described['rounds']} rounds; the worst step is the worst of all rounds. While training runs, "
        f"each rank has {small:,} tensors of 1 KiB and {mib} MiB in 16 large tensors; without training there are "
        f"{2 * mib} MiB in 16. {machine}."
    )


def _table(title: str, rows: Mapping[str, Mapping[str, float]], columns: Mapping[str, str]) -> list[str]:
    lines = [f"| {title} | {' | '.join(columns.values())} |", f"| --- |{' ---: |' * len(columns)}"]
    for name, each in rows.items():
        cells = (_number(each.get(column)) for column in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _ratio(ours: Figures, theirs: Figures, name: str) -> float | None:
    return ours[name] / theirs[name] if name in ours and theirs.get(name) else None


def _within(figures: Figures, name: str, other: str) -> float | None:
    return figures[name] / figures[other] if name in figures and figures.get(other) else None


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
