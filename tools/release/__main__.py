"""Steps of a release: `check` says what is missing, a version such as `0.2.0` writes it into every package.

`order` prints the packages as JSON, each after the packages that it needs.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path

from tools.release import change_notes, versions

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Check what is to be released, or prepare a version.

    Returns:
        The exit status: 1 if a check found something.
    """
    if arguments == ["order"]:
        print(json.dumps(versions.order(ROOT)))
        return 0
    if arguments != ["check"] and (len(arguments) != 1 or not versions.VERSION.fullmatch(arguments[0])):
        sys.stderr.write("usage: python -m tools.release check | order | MAJOR.MINOR.PATCH\n")
        return 2
    today = dt.datetime.now(tz=dt.timezone.utc).date()
    if arguments != ["check"]:
        versions.write(ROOT, arguments[0], today)
        change_notes.collect(ROOT, arguments[0], today)
    found = [*versions.disagreements(ROOT), *change_notes.not_collected(ROOT)]
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
