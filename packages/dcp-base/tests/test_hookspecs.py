from __future__ import annotations

import inspect

import pluggy
import pytest

from dcp_base import hookimpl, hookspecs
from dcp_base.hookspecs import HookSpecs


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
