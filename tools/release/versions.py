"""The rule for versions: all packages have one, and require each other at its minor. Read, checked and written."""

from __future__ import annotations

import datetime as dt
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_OURS = re.compile(r"(dcp-[\w-]+)(?:\[[\w,]+\])?(.*)")
_RANGE = re.compile(r'("dcp-[\w-]+(?:\[[\w,]+\])?)>=[^"]*"')


def projects(root: Path) -> dict[str, dict[str, Any]]:
    """The `project` table of each distribution, by its name."""
    found = [tomllib.loads(path.read_text())["project"] for path in sorted(root.glob("packages/*/pyproject.toml"))]
    return {project["name"]: project for project in found}


def disagreements(root: Path) -> list[str]:
    """Where the packages, and what they require of each other, are not of one version; and `CITATION.cff`."""
    packages = projects(root)
    found = {project["version"] for project in packages.values()}
    if len(found) != 1 or not all(map(VERSION.fullmatch, found)):
        said = ", ".join(f"{name} {project['version']}" for name, project in packages.items())
        return [f"all packages must have one version MAJOR.MINOR.PATCH: {said}"]
    (version,) = found
    wrong = [
        f"{name} requires {line!r}: write it as {required[1]}{_range(version)}"
        for name, project in packages.items()
        for line in _requirements(project)
        if (required := _OURS.fullmatch(line)) and required[1] in packages and required[2] != _range(version)
    ]
    if f"\nversion: {version}\n" not in (root / "CITATION.cff").read_text():
        wrong.append(f"CITATION.cff must say `version: {version}`")
    return wrong


def write(root: Path, version: str, day: dt.date) -> None:
    """Give every package a version, and ranges that fit it."""
    for path in root.glob("packages/*/pyproject.toml"):
        text = re.sub(r'^version = ".*"$', f'version = "{version}"', path.read_text(), count=1, flags=re.MULTILINE)
        path.write_text(_RANGE.sub(rf'\1{_range(version)}"', text))
    citation = root / "CITATION.cff"
    lines = [line for line in citation.read_text().splitlines() if not line.startswith(("version:", "date-released:"))]
    citation.write_text("\n".join([*lines, f"version: {version}", f"date-released: {day}", ""]))


def _range(version: str) -> str:
    major, minor, _ = version.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _requirements(project: dict[str, Any]) -> list[str]:
    return [
        *project["dependencies"],
        *(line for each in project.get("optional-dependencies", {}).values() for line in each),
    ]


def order(root: Path) -> list[str]:
    """Return the packages, each after the packages that it needs: the order in which they are published."""
    packages = projects(root)
    needs = {
        name: {re.split(r"[^\w-]", line, maxsplit=1)[0] for line in project["dependencies"]} & packages.keys()
        for name, project in packages.items()
    }
    return [*TopologicalSorter(needs).static_order()]
