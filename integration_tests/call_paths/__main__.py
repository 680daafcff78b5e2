"""`python -m integration_tests.call_paths [--json] [--list OPERATION]`: what each operation passes through, counted."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from dcp_ranks.testing.ranks import RankPool
from integration_tests.call_paths.counting import CallPath
from integration_tests.call_paths.operations import operations


def main() -> int:
    """Print the counts of rank 0 of two."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.call_paths", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--list", metavar="OPERATION", help="print the functions of one operation, by module")
    arguments = parser.parse_args()
    found = measure()
    if arguments.list:
        print("\n".join(_functions(found[arguments.list])))
    elif arguments.json:
        print(json.dumps({name: path.figures() for name, path in found.items()}, indent=1))
    else:
        print(f"{'rank 0 of 2':24s} functions modules  calls depth")
        for name, path in found.items():
            print(f"{name:24s} {' '.join(f'{number:7d}' for number in path.figures().values())}")
    return 0


def measure() -> dict[str, CallPath]:
    """Carry out every operation on two ranks; what rank 0 passed through."""
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(2)
        try:
            found: list[dict[str, CallPath]] = pool.run(2, operations, Path(folder))
        finally:
            pool.close()
    return found[0]


def _functions(path: CallPath) -> list[str]:
    return [f"{calls:6d}  {module}:{name}" for (module, name), calls in sorted(path.calls.items())]


if __name__ == "__main__":
    sys.exit(main())
