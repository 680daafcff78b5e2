"""`dir()` of every package has its public names: shells and notebooks complete them before anything is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FRONT_DOORS = sorted(Path(__file__).parents[2].glob("packages/*/src/*/__init__.py"))
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
    lazy = [path.parent.name for path in FRONT_DOORS if "import_lazily" in path.read_text()]
    others = [path.parent.name for path in FRONT_DOORS if path.parent.name not in lazy]
    assert lazy
    command = [sys.executable, "-c", LISTED, *lazy, *others]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    absent = {name for name, missing in found.items() if isinstance(missing, str) and not missing.startswith("dcp_")}
    assert {name: missing for name, missing in found.items() if missing and name not in absent} == {}
    assert not absent & {*lazy}
