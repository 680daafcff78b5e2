"""Looking for plug-ins is quick: their modules, and the packages around them, import nothing but `dcp_base`."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points

import pytest

from dcp_base import imports

PLUGINS = sorted(entry_points(group="dcp"), key=lambda point: point.name)
# What `dcp_base` and Python itself import, and what notes events: an observer is light, or it would be slow.
ALLOWED = {"dcp_base", "pluggy"}

CHILD = """
import importlib, json, sys
before = {name.split(".")[0] for name in sys.modules}
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} - before)))
"""


def test_every_package_with_a_plugin_is_here() -> None:
    assert {"format", "fs", "fsspec", "object", "state", "transforms"} <= {point.name for point in PLUGINS}


@pytest.mark.parametrize("point", PLUGINS, ids=[point.name for point in PLUGINS])
def test_plugin_modules_are_light(point: EntryPoint) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, point.module], capture_output=True, text=True, check=True, timeout=250
    )
    imported = {*json.loads(ran.stdout)} - sys.stdlib_module_names
    assert imported - ALLOWED == {point.module.split(".")[0]}


@pytest.mark.parametrize("point", PLUGINS, ids=[point.name for point in PLUGINS])
def test_no_lazy_name_is_hidden_by_a_module(point: EntryPoint) -> None:
    """A submodule that is imported becomes an attribute of its package, and `__getattr__` is not asked any more."""
    package = importlib.import_module(point.module.split(".")[0])
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & {*package.__all__} == set()
    try:
        assert all(hasattr(package, name) for name in package.__all__)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("dcp_"):
            raise
        pytest.skip(f"needs {error.name}: `nox -s frameworks` installs it")


def test_listing_all_plugins_imports_no_torch() -> None:
    code = (
        "import sys; from dcp_base import installed; broken = [info for info in installed.list() if info.error];"
        "print(broken, sorted({'torch', 'numpy', 'obstore', 'fsspec', 'dcp_core', 'dcp_io'} & {*sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250)
    assert ran.stdout.split() == ["[]", "[]"]


@pytest.mark.parametrize("part", imports.PARTS)
def test_every_part_is_where_the_table_says(part: str) -> None:
    assert callable(imports.import_part(part))
