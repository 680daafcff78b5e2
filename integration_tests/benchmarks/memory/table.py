"""Tables of what was found, as Markdown, with the bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from integration_tests.benchmarks.figures import paired

__all__ = ["show_background", "show_blocking", "show_lost_host", "show_memory", "show_restart"]

_RESTART, _WHOLE, _RAW, _BLOCKED, _BACKGROUND = 2.0, 8.0, 0.6, 1.3, 0.02
_MIB = 1 << 20
Rows = Iterable[Mapping[str, Any]]


def show_restart(rows: Rows) -> list[str]:
    """Return the table of restarts of all processes of a host."""
    lines = [
        "| all processes start again | state | load, s | one memcpy, s | ÷ | met (≤ 2) | imports and start, s |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for row in rows:
        ratio = _ratio(row["seconds"], row["memcpy"])
        ranks = "1 rank" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        lines.append(
            f"| {ranks} | {row['mib']:.0f} MiB | {_spread(row['seconds'])} | {_spread(row['memcpy'])} | "
            f"{ratio:.2f} | {_met(ok=ratio <= _RESTART, right=row['right'])} | {row['start']:.1f} |"
        )
    return lines


def show_lost_host(rows: Rows) -> list[str]:
    """Return the table of the loss of one of four hosts."""
    found = list(rows)
    stock = next((statistics.median(row["seconds"]) for row in found if row["what"].startswith("stock")), None)
    lines = [
        "| one of four hosts is lost, 8 ranks | bytes | network of a host | load, s | compared with | target | met |",
        "| --- | ---: | --- | ---: | --- | --- | --- |",
    ]
    for row in found:
        seconds, beside, bar, met = statistics.median(row["seconds"]), "", "", ""
        if row["what"] == "whole state" and stock is not None:
            beside, bar = f"stock ÷ this: {stock / seconds:.1f}", f"≥ {_WHOLE:g}"
            met = _met(ok=stock / seconds >= _WHOLE, right=row["right"])
        if row["what"] == "lost part":
            share = row["raw"] / seconds
            beside = f"one TCP stream {row['raw']:.2f} s: {share:.2f} of its rate"
            beside += f" ({row['raw untouched'] / seconds:.2f} of one into untouched memory)"
            bar = f"≥ {_RAW:g}"
            met = _met(ok=share >= _RAW, right=row["right"])
        wire = row.get("wire", "200 MB/s in all") or "no limit"
        lines.append(
            f"| {row['what']} | {row['mib']:.0f} MiB | {wire} | {_spread(row['seconds'])} | {beside} | {bar} | {met} |"
        )
    return lines


def show_blocking(rows: Rows) -> list[str]:
    """Return the table of what saves cost the trainer."""
    lines = [
        "| ranks, all at once | state | `save` returns after, s | one memcpy, s | ÷ | met (≤ 1.3) |",
        "| ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        ratio = _ratio(row["blocked"], row["memcpy"])
        lines.append(
            f"| {row['ranks']} | {row['mib']:.0f} MiB | {_spread(row['blocked'])} | {_spread(row['memcpy'])} | "
            f"{ratio:.2f} | {_met(ok=ratio <= _BLOCKED)} |"
        )
    return lines


def show_background(rows: Rows) -> list[str]:
    """Return the sentence about copies on the other host beside training."""
    lines = []
    for row in rows:
        pairs = paired(row["taken"]["with"], row["taken"]["without"])
        ratio = float("nan") if pairs is None else pairs.median - 1
        waited = {name: statistics.median(row["waited"][name]) for name in ("with", "without")}
        lines.append(
            f"Copies on the next host, in the background at {row['rate'] / 1e6:.0f} MB/s, with a save of "
            f"{row['mib']:.0f} MiB about every {row['seconds']:.0f} s of training on 2 hosts, which share two cores: "
            f"{ratio:+.1%} of training time (≤ {_BACKGROUND:.0%}: {'met' if ratio <= _BACKGROUND else 'missed'}), the "
            f"median of {len(row['taken']['with'])} pairs of neighbouring turns. The training's thread waited for "
            f"{waited['with']:.2f} s of a turn, and for {waited['without']:.2f} s without copies."
        )
    return lines


def show_memory(rows: Rows) -> list[str]:
    """Return the sentence about the memory that keepers take."""
    return [
        f"Memory of a host at most, with 2 generations and copies on the next host: {row['most'] / _MIB:.0f} MiB for a "
        f"share of {row['share'] / _MIB:.0f} MiB (allowed: 5 shares and 64 MiB, {row['allowed'] / _MIB:.0f} MiB: "
        f"{'met' if row['most'] <= row['allowed'] else 'missed'})."
        for row in rows
    ]


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    found = paired(ours, theirs)
    return float("nan") if found is None else found.median


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _met(*, ok: bool, right: bool = True) -> str:
    return "**wrong values**" if not right else "yes" if ok else "**no**"
