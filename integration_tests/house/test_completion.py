"""Public names of packages: shells, notebooks and type checkers know them before anything is imported."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FRONT_DOORS = sorted(Path(__file__).parents[2].glob("packages/*/src/*/__init__.py"))
LAZY = [path for path in FRONT_DOORS if "import_lazily(" in path.read_text()]
LISTED = """
import importlib, json, sys
missing = {}
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:  # of a framework that is not installed here
        missing[name] = error.name
        continue
    missing[name] = sorted(set(module.__all__) - set(dir(module)))
print(json.dumps(missing))
"""


def test_public_names_are_listed() -> None:
    # Lazy packages come first, so that no other package has imported their names.
    lazy = [path.parent.name for path in LAZY]
    others = [path.parent.name for path in FRONT_DOORS if path.parent.name not in lazy]
    assert lazy
    command = [sys.executable, "-c", LISTED, *lazy, *others]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    absent = {name for name, missing in found.items() if isinstance(missing, str) and not missing.startswith("dcp_")}
    assert {name: missing for name, missing in found.items() if missing and name not in absent} == {}
    assert not absent & {*lazy}


def _texts(node: ast.expr) -> list[str]:
    """The texts in an expression, also in tuples that are unpacked there."""
    return [each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_lazy_packages_are_found() -> None:
    assert {"dcp_all", "dcp_base", "dcp_state"} <= {path.parent.name for path in LAZY}


@pytest.mark.parametrize("path", LAZY, ids=lambda path: str(path.parent.name))
def test_type_checkers_see_what_is_imported_on_first_use(path: Path) -> None:
    """The imports for type checkers, each an explicit re-export, and those on first use are of the same names."""
    tree = ast.parse(path.read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assigned = [node for node in checked.body if isinstance(node, ast.Assign)]
    again = {ast.unparse(node.value): ast.unparse(node.targets[0]) for node in assigned}
    at_once = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "dcp_base.imports"]
    aliases = [
        (node.module, alias)
        for node in [*checked.body, *at_once]
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    seen = {(module, f"{x.name} as {again[x.name]}" if x.name in again else x.name) for module, x in aliases}
    assert {x.name for _, x in aliases} == {x.asname for _, x in aliases if x.asname} | {*again}
    (homes,) = (
        node.args[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "import_lazily"
    )
    assert isinstance(homes, ast.Dict)
    pairs = zip(homes.keys, homes.values, strict=True)
    assert {(ast.literal_eval(module), name) for module, names in pairs if module for name in _texts(names)} == seen
