"""Branch coverage of each package, from the report of coverage.py, and the sentence in its README: for `noxfile.py`."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

__all__ = ["ALL", "package_percents", "pytest_configure", "write_percent"]

ALL = "all"
_LINE = re.compile(r"\n*<!-- coverage, written by `nox -s coverage` -->\n.*\n")


def package_percents(report: Path) -> dict[str, float]:
    """Return the share of lines and branches that ran, in percent, per package and for `ALL`, from `coverage json`."""
    ran: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for name, entry in json.loads(report.read_text())["files"].items():
        summary: dict[str, Any] = entry["summary"]
        for key in (Path(name).parts[1], ALL):
            ran[key] += summary["covered_lines"] + summary["covered_branches"]
            there[key] += summary["num_statements"] + summary["num_branches"]
    return {key: 100 * ran[key] / there[key] for key in sorted(there) if there[key]}


def write_percent(readme: Path, percent: float) -> None:
    """Write a package's figure at the end of its README, in place of the last one. Rounds down."""
    text = _LINE.sub("\n", readme.read_text()).rstrip("\n")
    said = f"Tests of the whole repository run {int(percent)} % of this package's lines and branches."
    readme.write_text(f"{text}\n\n<!-- coverage, written by `nox -s coverage` -->\n{said}\n")


def pytest_configure() -> None:
    """Give the workers of pytest-xdist time to save what they measured: by default, they are killed after 10 s."""
    from xdist.workermanage import NodeManager  # type: ignore[import-untyped]

    NodeManager.EXIT_TIMEOUT = 600
