"""`python -m integration_tests.benchmarks`: measure, show, and write results as JSON."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from integration_tests.benchmarks import folders, machine
from integration_tests.benchmarks.bars import judge
from integration_tests.benchmarks.cases import CASES, Case, Row, select
from integration_tests.benchmarks.contenders import CONTENDERS, Contender
from integration_tests.benchmarks.results import Results
from integration_tests.benchmarks.runner import CaseRun, takes_part
from integration_tests.benchmarks.screen import print_bars, print_row, progress

__all__ = ["main"]

Plan = list[tuple[Case, list[Row], list[Contender]]]


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s bench --", description=__doc__)
    parser.add_argument("--list", action="store_true", help="show cases and contenders, and end")
    parser.add_argument("--case", action="append", default=[], choices=[case.name for case in CASES], metavar="NAME")
    parser.add_argument(
        "--contender", action="append", default=[], choices=[each.name for each in CONTENDERS], metavar="NAME"
    )
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds; one more warms up (default: 9)")
    parser.add_argument("--scale", type=float, default=1.0, help="of all sizes; for a smoke test (default: 1)")
    parser.add_argument("--place", action="append", default=[], choices=list(folders.DEFAULT_PLACES), help="only here")
    parser.add_argument(
        "--disk", default=folders.DEFAULT_PLACES["disk"], help="a folder on a disk (default: %(default)s)"
    )
    parser.add_argument("--tmpfs", default=folders.DEFAULT_PLACES["tmpfs"], help="one in memory (default: %(default)s)")
    parser.add_argument(
        "--json", type=Path, help="write results here; rows that it has already stay unless measured anew"
    )
    return parser.parse_args(given)


def _plan(options: argparse.Namespace) -> Plan:
    """Case, its rows and who takes part."""
    places = options.place or list(folders.DEFAULT_PLACES)
    wanted = [each for each in CONTENDERS if not options.contender or each.name in options.contender]
    plan = [
        (case, [row for row in case.rows if row.place in places], [each for each in wanted if takes_part(each, case)])
        for case in select(options.case)
    ]
    return [(case, rows, contenders) for case, rows, contenders in plan if rows and contenders]


def _list(console: Console) -> None:
    for case in CASES:
        rows = ", ".join(f"{row.place} {'with' if row.fsync else 'without'} fsync" for row in case.rows)
        console.print(f"{case.name:14} {case.title} ({rows})", highlight=False)
    for contender in CONTENDERS:
        console.print(f"{contender.name:26} {contender.note}", highlight=False)


def main(given: Sequence[str]) -> int:
    """Run what was asked for; 0 unless a contender of ours failed."""
    options = _arguments(given)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    if options.list:
        _list(console)
        return 0
    plan = _plan(options)
    keep = options.json is not None and options.json.exists()
    results = Results.read(options.json) if keep else Results()
    visits = (1 + options.rounds) * sum(len(rows) * len(contenders) for _, rows, contenders in plan)
    with (
        tempfile.TemporaryDirectory(prefix="dcp-bench-logs-") as logs,
        folders.opened({"disk": options.disk, "tmpfs": options.tmpfs}) as places,
        progress(console, visits) as say,
    ):
        results.machine = machine.describe(places)
        for case, rows, contenders in plan:
            with CaseRun(case, contenders, options.scale, options.rounds, Path(logs), say, results.versions) as run:
                for row in rows:
                    found = run.run(row, places[row.place])
                    print_row(console, found)
                    results.put(found)
                    if options.json is not None:
                        results.write(options.json)
    print_bars(console, judge(results))
    ours_failed = any(
        entry.failure for row in results.rows for name, entry in row.entries.items() if name.startswith("ours")
    )
    return int(ours_failed)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that folders and processes are cleared away
    sys.exit(main(sys.argv[1:]))
