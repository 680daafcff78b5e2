"""Branch coverage of each package, from the report of coverage.py, and the sentence in its README: for `noxfile.py`."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["ALL", "package_percents", "pytest_sessionfinish", "write_percent"]

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
    said = f"Test coverage: {int(percent)} %."
    readme.write_text(f"{text}\n\n<!-- coverage, written by `nox -s coverage` -->\n{said}\n")


def pytest_sessionfinish() -> None:
    """Save what this process has measured while pytest-xdist waits: it ends workers by a signal soon after this."""
    coverage = import_module("coverage")  # not in the environment of nox, which imports this module
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.stop()
        measured.save()
