"""The tree of errors in the docstring of `dcp_core.errors` is the one that the packages have."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator

from dcp_core import errors
from integration_tests.composition import selections

PACKAGES = sorted({name.replace("-", "_") for name in selections.PACKAGES} - {"dcp_all"})  # without adapters
LEFT_OUT = {"testing", "__main__"}
LINE = re.compile(r"(?P<lines>[│├└─ ]*)(?:(?P<package>dcp_\w+)\.)?(?P<name>\w+)(?: \((?P<others>[\w., ]+)\))?  +\S.*")
HEADING = re.compile(r"[│ ]*(dcp_\w+):")


def drawn() -> dict[str, tuple[str, ...]]:
    """The lines of the drawing: package and class → the names of its bases, that of the line above it first."""
    (tree,) = re.findall(r"^```\n(.*?)^```$", inspect.getdoc(errors) or "", re.MULTILINE | re.DOTALL)
    found: dict[str, tuple[str, ...]] = {}
    package, above = "", [""]
    for line in tree.splitlines():
        if heading := HEADING.fullmatch(line):
            package = heading[1]
            continue
        part = LINE.fullmatch(line)
        assert part is not None, f"not a line of the tree: {line!r}"
        depth = len(part["lines"]) // 3
        others = part["others"].split(", ") if part["others"] else []
        bases = (above[depth], *others) if depth else tuple(others)
        found[f"{part['package'] or package}.{part['name']}"] = bases
        above[depth + 1 :] = [part["name"]]
    return found


def modules(package: str) -> Iterator[str]:
    yield package
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not LEFT_OUT & {*info.name.split(".")}:
            yield info.name


def defined() -> dict[str, tuple[str, ...]]:
    """The exceptions of all packages, with the names of their bases."""
    found = {}
    for package in PACKAGES:
        for name in modules(package):
            for kind in vars(importlib.import_module(name)).values():
                public = inspect.isclass(kind) and issubclass(kind, BaseException) and not kind.__name__.startswith("_")
                if public and kind.__module__ == name:
                    found[f"{package}.{kind.__name__}"] = tuple(base.__name__ for base in kind.__bases__)
    return found


def test_the_drawing_is_the_hierarchy() -> None:
    classes = defined()
    assert len(classes) > 30, "few found: the test looks in the wrong place"
    assert drawn() == classes
