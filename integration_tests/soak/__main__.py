"""`python -m integration_tests.soak`: a run that must survive a month, in an hour."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from integration_tests.soak.run import soak


def main() -> int:
    """Run, report, and say by the exit status whether anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.soak", description=__doc__)
    parser.add_argument("--saves", type=int, default=500, help="how many saves (default: 500)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: 0)")
    parser.add_argument("--json", type=Path, help="a file for the report")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dcp-soak-") as folder:
        report = soak(Path(folder), saves=arguments.saves, seed=arguments.seed, progress=_progress)
    text = json.dumps({**vars(report), "problems": report.problems}, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if report.problems else 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
