"""Damage checkpoints at random and see what loads make of it.

`python -m integration_tests.robustness.campaign --trials 10000 --seed 0 --json figures.json`; ends with 1 if anything
happened that must not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dcp_ranks.testing.ranks import RankPool
from integration_tests.robustness.campaign.report import summary, table
from integration_tests.robustness.campaign.subjects import NAMES, make_all
from integration_tests.robustness.campaign.trials import BAD
from integration_tests.robustness.campaign.worker import Worker

_TELL_SECONDS = 5.0


def run(trials: range, seed: int, names: tuple[str, ...], *, tell: bool = False) -> list[dict[str, Any]]:
    """The outcomes of trials, each in a process that may end or hang."""
    outcomes: list[dict[str, Any]] = []
    told = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dcp-campaign-") as folder:
        root = Path(folder)
        with RankPool(max_ranks=2) as ranks:
            make_all(root / "made", ranks)
        worker = Worker((root / "made", seed, names, root / "scratch"))
        try:
            for number in trials:
                outcome = worker.run(number)
                outcomes.append({"subject": names[number % len(names)], "hurt": "?", **outcome})
                if tell and (time.monotonic() - told > _TELL_SECONDS or number == trials[-1]):
                    told = time.monotonic()
                    counts = Counter(each["result"] for each in outcomes)
                    print(f"\r{len(outcomes):,} of {len(trials):,}: {dict(counts)}", end="", file=sys.stderr)
        finally:
            worker.close()
    if tell:
        print(file=sys.stderr)
    return outcomes


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.robustness.campaign", description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial: to see one of them again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--subject", action="append", choices=NAMES, help="only these; several times for several")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.trials)
    started = time.monotonic()
    outcomes = run(numbers, options.seed, tuple(options.subject or NAMES), tell=True)
    figures = {**summary(outcomes), "seed": options.seed, "seconds": round(time.monotonic() - started)}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures))
    bad = [each for each in outcomes if each["result"] in BAD]
    for each in bad[:20]:
        print(f"trial {each['number']}, {each['subject']}, {each['hurt']}: {each['result']}: {each['detail']}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
