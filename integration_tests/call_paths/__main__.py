"""`python -m integration_tests.call_paths`: what each operation passes through, counted, on rank 0 of two ranks.

With `--figures`, all figures of simplicity beside their bounds and aims. With `--write-page`, the list of modules in
`docs/development/architecture.md` is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from dcp_ranks.testing.ranks import RankPool
from integration_tests.call_paths.counting import CallPath
from integration_tests.call_paths.figures import measure_figures, table
from integration_tests.call_paths.operations import one_process, operations
from integration_tests.call_paths.walk import PAGE, measure_second_save, replaced, walk_lines


def main() -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(prog="python -m integration_tests.call_paths", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--list", metavar="OPERATION", help="print the functions of one operation, by module")
    parser.add_argument("--walk", metavar="OPERATION", help="print the modules of one operation in order, explained")
    parser.add_argument("--figures", action="store_true", help="print the figures of simplicity instead")
    parser.add_argument("--write-page", action="store_true", help=f"write the modules of a second save to {PAGE.name}")
    arguments = parser.parse_args()
    if arguments.write_page:
        PAGE.write_text(replaced(PAGE.read_text(), walk_lines(measure_second_save())))
        return 0
    if arguments.figures:
        print(table(measure_figures()))
        return 0
    found = measure()
    if arguments.list:
        print("\n".join(_functions(found[arguments.list])))
    elif arguments.walk:
        print(walk_lines(found[arguments.walk]), end="")
    elif arguments.json:
        print(json.dumps({name: path.figures() for name, path in found.items()}, indent=1))
    else:
        print(f"{'rank 0 of 2':31s} functions modules  calls   depth switches")
        for name, path in found.items():
            print(f"{name:31s} {' '.join(f'{number:8d}' for number in path.figures().values())}")
    return 0


def measure() -> dict[str, CallPath]:
    """Carry out every operation on two ranks, and the second save on one; what rank 0 passed through."""
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(2)
        try:
            found: list[dict[str, CallPath]] = pool.run(2, operations, Path(folder) / "two")
            found += pool.run(1, one_process, Path(folder))
        finally:
            pool.close()
    return found[0] | found[-1]


def _functions(path: CallPath) -> list[str]:
    return [f"{calls:6d}  {module}:{name}" for (module, name), calls in sorted(path.calls.items())]


if __name__ == "__main__":
    sys.exit(main())
