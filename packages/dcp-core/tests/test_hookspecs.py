from __future__ import annotations

import inspect
import subprocess
import sys

import pluggy
import pytest

from dcp_core import hookspecs
from dcp_core.hookspecs import HookSpecs, hookimpl


def hooks() -> list[str]:
    return [name for name in vars(HookSpecs) if name.startswith("dcp_")]


def test_every_hook_is_a_described_specification() -> None:
    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(HookSpecs)
    assert set(vars(manager.hook)) & set(hooks()) == set(hooks())
    for name in hooks():
        assert inspect.getdoc(getattr(HookSpecs, name))


def test_a_hook_that_does_not_exist_is_found_out() -> None:
    class Plugin:
        @hookimpl
        def dcp_register_everything(self) -> None: ...

    manager = pluggy.PluginManager(hookspecs.PROJECT_NAME)
    manager.add_hookspecs(HookSpecs)
    manager.register(Plugin())
    with pytest.raises(pluggy.PluginValidationError):
        manager.check_pending()


def test_importing_dcp_core_reads_no_entry_points() -> None:
    code = (
        "import importlib.metadata as m\n"
        "def refuse(*args, **kwargs): raise AssertionError('read entry points')\n"
        "import torch\n"
        "m.entry_points = refuse\n"
        "import dcp_core.plugins\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
