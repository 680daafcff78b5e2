"""`python -m integration_tests.composition`: all selections, one line each that failed, and a count."""

from __future__ import annotations

import sys

from integration_tests.composition.run import outcomes
from integration_tests.composition.selections import closure, selections


def main() -> int:
    """0 if every selection works."""
    asked = selections()
    failed = 0
    for names, error in outcomes(asked):
        if error is not None:
            failed += 1
            print(f"{' + '.join(names)}:\n{error}")
    different = len({closure(each) for each in asked})
    print(f"{len(asked)} selections, which bring {different} different sets of packages: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
