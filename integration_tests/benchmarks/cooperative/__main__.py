"""`python -m integration_tests.benchmarks.cooperative`: measure, show, and write figures to a page.

    python -m integration_tests.benchmarks.cooperative [objects folder choice copies] [--rounds N] [--scale X]
        [--page docs/cooperative-loads.md]

Ranks are processes of this machine, the object server and its clients lie in network namespaces (root is needed for
`objects`). Ways of loading take turns in random order; ratios are medians of paired ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from integration_tests.benchmarks import machine
from integration_tests.benchmarks.cooperative.scenarios import (
    Outcome,
    run_choice,
    run_copies,
    run_folder,
    run_objects,
)
from integration_tests.benchmarks.cooperative.table import show_choice, show_copies, show_throttled
from integration_tests.benchmarks.folders import DEFAULT_PLACES
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["main"]

_MODULE = "integration_tests.benchmarks.cooperative"
_Run = Callable[[], Iterable[Outcome]]
_Show = Callable[[Iterable[Outcome]], list[str]]


def main(given: Sequence[str]) -> int:
    """Run what was asked for; 0 if all bars were met."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("what", nargs="*", default=[], metavar="objects|folder|choice|copies", help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds; one more warms up (default: 9)")
    parser.add_argument("--slow-rounds", type=int, default=3, help="of loads that take minutes (default: 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; for a smoke test (default: 1)")
    parser.add_argument("--disk", default=DEFAULT_PLACES["disk"], help="a folder on a disk (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="a page of the docs in which the figures are replaced")
    options = parser.parse_args(given)
    mib, rounds, slow = 256 * options.scale, options.rounds, options.slow_rounds
    runs: dict[str, tuple[_Run, _Show]] = {
        "objects": (partial(run_objects, mib, rounds, slow), show_throttled),
        "folder": (partial(run_folder, mib, rounds, slow), show_throttled),
        "choice": (partial(run_choice, mib, rounds, options.disk), show_choice),
        "copies": (partial(run_copies, 4 * mib, rounds), show_copies),
    }
    if unknown := {*options.what} - {*runs}:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(runs)}")
    lines = [_describe(rounds, slow)]
    for name in options.what or runs:
        run, show = runs[name]
        lines += ["", *show(_told(run()))]
    print("\n".join(lines))
    if options.page:
        replace_figures(options.page, _MODULE, lines)
    return int(any("**no**" in line for line in lines))


def _told(outcomes: Iterable[Outcome]) -> Iterable[Outcome]:
    for outcome in outcomes:
        medians = ", ".join(f"{name} {taken.median:.2f} s" for name, taken in outcome.taken.items())
        print(f"{outcome.name}, {outcome.ranks} ranks: {medians}", file=sys.stderr, flush=True)
        yield outcome


def _describe(rounds: int, slow_rounds: int) -> str:
    facts = machine.describe({})
    busy = os.getloadavg()[1]
    return (
        f"{facts['processor']}, {facts['memory']}, {facts['system']}, Python {facts['Python']}; load average at the "
        f"beginning {busy:.1f}. Medians of {rounds} rounds ({slow_rounds} where each rank reads for itself from a "
        "throttled storage), in brackets the least and the most."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
