"""Tables of what was found, as Markdown, with the bars."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from integration_tests.benchmarks.cooperative.scenarios import Outcome

__all__ = ["show_choice", "show_copies", "show_throttled"]

_ON_ONE_HOST, _ON_HOSTS, _WITH_SLOW, _COPIES, _CHOICE = 1.15, 1.25, 1.5, 1.15, 1.1


def show_throttled(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the table of loads from a throttled storage: seconds ÷ (unique bytes ÷ limit), of each way."""
    lines = [
        "| storage, 100 MB/s in total | ranks | together ÷ least | bar | met | each for itself | stock | read once |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for one in outcomes:
        bar = _WITH_SLOW if "tenth" in one.name else _ON_HOSTS if "hosts" in one.name else _ON_ONE_HOST
        together = one.taken["together"]
        ratios = [seconds / one.least_seconds for seconds in together.seconds]
        others = [
            f"{one.taken[way].median / one.least_seconds:.1f}" if way in one.taken else "" for way in ("alone", "stock")
        ]
        read = f"{statistics.median(together.read):.2f}"
        if "tenth" in one.name:
            read += f", the slow rank {statistics.median(together.slow_read):.3f}"
        lines.append(
            f"| {one.name} | {one.ranks} | {_spread(ratios)} | ≤ {bar} | {_met(statistics.median(ratios), bar)} | "
            f"{others[0]} | {others[1]} | {read} |"
        )
    return lines


def show_choice(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the table of what `None` chooses: seconds, and the ratio to the faster of the two others."""
    lines = [
        "| storage | ranks | None, s | True, s | False, s | None ÷ the faster one | met (≤ 1.1) |",
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in outcomes:
        chosen, together, alone = (one.taken[way] for way in ("chosen", "together", "alone"))
        faster = min(together, alone, key=lambda way: way.median)
        ratio = chosen.median / faster.median
        cells = " | ".join(_spread(way.seconds) for way in (chosen, together, alone))
        lines.append(f"| {one.name} | {one.ranks} | {cells} | {ratio:.2f} | {_met(ratio, _CHOICE)} |")
    return lines


def show_copies(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the table of loads from memory beside their floor: wall time and processor time."""
    lines = [
        "| state on tmpfs | ranks | of | together | each for itself | floor | together ÷ floor | met (≤ 1.15) |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in outcomes:
        for column, name in (("seconds", "time, s"), ("cpu_seconds", "processor time of all ranks, s")):
            cells = " | ".join(_spread(getattr(one.taken[way], column)) for way in ("together", "alone", "floor"))
            ratio = one.taken["together"].ratio(one.taken["floor"], column)
            lines.append(
                f"| {one.mib:.0f} MiB | {one.ranks} | {name} | {cells} | {ratio:.2f} | {_met(ratio, _COPIES)} |"
            )
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _met(ratio: float, bar: float) -> str:
    return "yes" if ratio <= bar else "**no**"
