"""`python -m integration_tests.robustness`: every fault point of every scenario, and what became of the checkpoints."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from integration_tests.robustness.points import POWER, PROCESS_KINDS, Tally, lose_power, strike
from integration_tests.robustness.scenarios import SCENARIOS, Lab, Scenario

__all__ = ["main", "table"]

KINDS = (*PROCESS_KINDS, POWER)


def main() -> int:
    """Try the points, report, and say by the exit status whether anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.robustness", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=[*SCENARIOS], help="only this one; may be repeated")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this fault; may be repeated")
    parser.add_argument("--at-most", type=int, help="so many points of each scenario, kind and rank; all if not given")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    arguments = parser.parse_args()
    logging.getLogger("dcp").setLevel(logging.CRITICAL)
    start = time.monotonic()
    tallies: list[Tally] = []
    with Lab() as lab:
        for name in arguments.scenario or SCENARIOS:
            for tally in _tallies(lab, SCENARIOS[name], arguments.kind or KINDS, arguments.at_most):
                tallies.append(tally)
                if arguments.json:
                    _write(arguments.json, tallies, time.monotonic() - start)
    print(table(tallies))
    return 1 if any(tally.losses for tally in tallies) else 0


def _tallies(lab: Lab, scenario: Scenario, kinds: list[str] | tuple[str, ...], at_most: int | None) -> Iterator[Tally]:
    if POWER in kinds:
        yield lose_power(lab, scenario, at_most=at_most, progress=_progress)
    for kind in PROCESS_KINDS:
        if kind in kinds:
            for rank in range(scenario.world):
                yield strike(lab, scenario, kind, rank=rank, at_most=at_most, progress=_progress)


def table(tallies: list[Tally]) -> str:
    """The figures as Markdown: how many states were judged, by scenario and kind, and how many were losses."""
    tried: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    losses: dict[str, int] = defaultdict(int)
    for tally in tallies:
        tried[tally.scenario][tally.kind] += tally.tried
        losses[tally.scenario] += len(tally.losses)
    lines = [f"| scenario | losses | {' | '.join(KINDS)} |", f"| --- |{' ---: |' * (len(KINDS) + 1)}"]
    for name, counts in tried.items():
        lines.append(f"| {name} | {losses[name]} | {' | '.join(str(counts[kind]) for kind in KINDS)} |")
    sums = [sum(counts[kind] for counts in tried.values()) for kind in KINDS]
    lines.append(f"| all | {sum(losses.values())} | {' | '.join(map(str, sums))} |")
    return "\n".join(lines)


def _write(path: Path, tallies: list[Tally], seconds: float) -> None:
    report = {"seconds": round(seconds, 1), "tallies": [vars(tally) for tally in tallies]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
