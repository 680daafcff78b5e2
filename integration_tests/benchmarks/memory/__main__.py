"""`python -m integration_tests.benchmarks.memory`: measure, show, and write figures to a page.

    python -m integration_tests.benchmarks.memory [restart lost blocking background memory] [--rounds N] [--mib N]
        [--page docs/memory.md]

Ranks are processes of this machine, hosts are network namespaces (root is needed for all but `restart` and `blocking`).
Each round of a recovery is a job of new processes; its imports and its start are shown apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.memory.scenarios import (
    run_background,
    run_blocking,
    run_lost_host,
    run_memory,
    run_restart,
)
from integration_tests.benchmarks.memory.table import (
    show_background,
    show_blocking,
    show_lost_host,
    show_memory,
    show_restart,
)
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["main"]

_MODULE = "integration_tests.benchmarks.memory"
_Rows = Iterable[Mapping[str, Any]]


def main(given: Sequence[str]) -> int:
    """Run what was asked for; 0 if all bars were met."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", default=[], metavar="PART", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stock-rounds", type=int, default=3, help="of loads that take long (default: 3)")
    parser.add_argument("--mib", type=float, default=1024.0, help="size of the state of all ranks together")
    parser.add_argument("--wire", default=None, help="rate of the network of each host, such as 10gbit (default: none)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training between two saves, for `background`")
    parser.add_argument("--rate-mb", type=float, default=100.0, help="of copies in the background (default: 100)")
    parser.add_argument("--page", type=Path, help="a page of the docs in which the figures are replaced")
    options = parser.parse_args(given)
    mib, rounds = options.mib, options.rounds
    lost = partial(run_lost_host, mib, rounds, options.stock_rounds, options.wire)
    background = partial(run_background, mib / 4, rounds, options.seconds, options.rate_mb * 1e6)
    runs: dict[str, tuple[Callable[[], _Rows], Callable[[_Rows], list[str]]]] = {
        "restart": (partial(run_restart, mib, rounds), show_restart),
        "lost": (lost, show_lost_host),
        "blocking": (partial(run_blocking, mib, rounds), show_blocking),
        "background": (background, show_background),
        "memory": (partial(run_memory, mib), show_memory),
    }
    if unknown := {*options.what} - {*runs}:
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(runs)}")
    lines = [f"Medians of {rounds} rounds, in brackets the least and the most."]
    for name in options.what or runs:
        run, show = runs[name]
        lines += ["", *show(run())]
        print("\n".join(lines[-6:]), file=sys.stderr, flush=True)
    print("\n".join(lines))
    if options.page:
        replace_figures(options.page, _MODULE, lines)
    return int(any("**" in line or "missed" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
