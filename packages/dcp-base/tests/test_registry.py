"""What is found of installed plug-ins, and what is said of those that are missing, broken or there twice."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable

import pytest

from dcp_base import (
    ANY_SCHEME,
    CheckpointEvent,
    DcpError,
    PluginLoadError,
    PluginNotFoundError,
    PluginRegistry,
    StoreSpec,
    hookimpl,
    installed,
    resolve,
)
from dcp_base.registry import TABLES

Install = Callable[[str, str], None]
MAPPED = [table for table in TABLES if TABLES[table].record is None]
EVENT = CheckpointEvent("save", "write", "finished", 0, "id", 1.5, 10)


def mapping(table: str, name: str, path: str = "collections:OrderedDict") -> str:
    return f"@hookimpl\ndef dcp_register_{table}():\n    return {{{name!r}: {path!r}}}\n"


def stores(*specs: str) -> str:
    return f"@hookimpl\ndef dcp_register_stores():\n    return [{', '.join(specs)}]\n"


@pytest.mark.parametrize("table", MAPPED)
def test_tables_of_factories(install: Install, table: str) -> None:
    install("alpha", mapping(table, "one"))
    install("beta", mapping(table, "two"))
    assert installed.names(table) == ("one", "two")
    assert installed.factory(table, "two") is OrderedDict
    assert all(installed.names(other) == () for other in TABLES if other != table)
    with pytest.raises(PluginNotFoundError, match=r"three.*installed: one, two.*install dcp-"):
        installed.factory(table, "three")


def test_stores_by_scheme(install: Install) -> None:
    install("special", stores("StoreSpec('toy', 'io:BytesIO')"))
    install("wide", stores("StoreSpec('toy', 'io:StringIO', fallback=True)", "StoreSpec(ANY_SCHEME, 'io:StringIO')"))
    spec, plugin = installed.find("stores", "toy")
    assert (spec, plugin.name) == (StoreSpec("toy", "io:BytesIO"), "special")
    assert [each.name for _, each in installed.offered("stores", "toy")] == ["special", "wide"]
    assert [entry.opener for entry, _ in installed.offered("stores", ANY_SCHEME)] == ["io:StringIO"]
    with pytest.raises(PluginNotFoundError, match=r"a store for s3:// places .*install dcp-object"):
        installed.find("stores", "s3")


def test_what_plugins_are(install: Install) -> None:
    install("alpha", mapping("transforms", "one") + mapping("converters", "two"))
    (info,) = installed.list()
    assert (info.name, info.distribution, info.error, info.module) == ("alpha", "alpha 1.2", None, "alpha_plugin")
    assert info.offers == {"transforms": ("one",), "converters": ("two",)}
    assert info.hooks == ("dcp_register_converters", "dcp_register_transforms")


def test_the_same_name_twice_names_both(install: Install) -> None:
    install("one", mapping("converters", "x"))
    install("two", mapping("converters", "x") + mapping("transforms", "y"))
    assert installed.factory("transforms", "y")
    with pytest.raises(DcpError, match=r"one 1\.2.*two 1\.2"):
        installed.find("converters", "x")


BROKEN = {
    "import": ("import no_such_module_anywhere\n", ()),
    "hook raises": (
        "@hookimpl\ndef dcp_register_converters():\n    raise OSError('in hook')\n",
        ("dcp_register_converters",),
    ),
    "unknown hook": ("@hookimpl\ndef dcp_register_nothing(): ...\n", ("dcp_register_nothing",)),
    "wrong record": (stores("'s3'"), ("dcp_register_stores",)),
    "wrong mapping": (mapping("converters", "x", "no colon"), ("dcp_register_converters",)),
    "one name twice": (stores("StoreSpec('x', 'a:b')", "StoreSpec('x', 'a:b')"), ("dcp_register_stores",)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_raises_only_when_it_may_be_needed(install: Install, how: str) -> None:
    code, hooks = BROKEN[how]
    install("bad", code)
    install("good", mapping("converters", "good"))
    assert installed.factory("converters", "good") is OrderedDict
    (bad,) = [info for info in installed.list() if info.name == "bad"]
    assert bad.error
    assert bad.hooks == hooks
    with pytest.raises(PluginLoadError, match=r"the converter 'other'.*bad 1\.2.*" + bad.error.split(":")[0]):
        installed.find("converters", "other")


def test_everything_that_plugins_name_can_be_imported_to_see(install: Install) -> None:
    install("good", mapping("converters", "x") + stores("StoreSpec('x', 'io:BytesIO')"))
    install("half", stores("StoreSpec('y', 'io:BytesIO')", "StoreSpec('z', 'half_nowhere:open_store')"))
    good, half = installed.list()
    installed.import_offers(good)
    with pytest.raises(PluginLoadError, match=r"half 1\.2.*half_nowhere:open_store") as caught:
        installed.import_offers(half)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def implementing(**hooks: Callable[..., object]) -> object:
    """A plug-in with these hooks."""
    return type("Plugin", (), {name: hookimpl(hook) for name, hook in hooks.items()})()


def test_messages_are_safe_for_terminals(install: Install) -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        installed.find("transforms", "\x1b[2J\u202e")
    assert str(caught.value).isprintable()
    assert r"\x1b[2J\u202e" in str(caught.value)


def test_observers_never_fail_the_caller(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[CheckpointEvent] = []

    class Watcher:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            seen.append(event)

    class Failing:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            raise RuntimeError("observer broke")

    for plugin in (Watcher(), Failing()):
        installed.register(plugin, name=type(plugin).__name__)
    with caplog.at_level(logging.WARNING, "dcp_base"):
        installed.emit(EVENT)
    assert seen == [EVENT]
    assert "Failing" in caplog.text
    assert "observer broke" in caplog.text
    diverted: list[CheckpointEvent] = []
    installed.divert_events(diverted.append)
    try:
        installed.emit(EVENT)
    finally:
        installed.divert_events(None)
    assert (seen, diverted) == ([EVENT], [EVENT])


def test_discovery_is_lazy_and_happens_once(install: Install) -> None:
    install("alpha", mapping("converters", "x"))
    assert "alpha_plugin" not in sys.modules
    assert installed.list()
    install("beta", mapping("converters", "y"))
    assert len(installed.list()) == 1


def test_the_group_is_dcp() -> None:
    assert PluginRegistry()._group == "dcp"


def test_attributes_of_attributes(install: Install) -> None:
    install("alpha", mapping("converters", "x", "datetime:datetime.fromisoformat"))
    path, plugin = installed.find("converters", "x")
    assert resolve(path, plugin)("2026-01-01").year == 2026


CHILD = """
import importlib.metadata, json, sys
importlib.metadata.entry_points = None  # cannot be called
import dcp_base; dcp_base.installed
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""


def test_importing_it_reads_no_entry_points_and_takes_pluggy_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, timeout=250)
    ours = {name for name in json.loads(ran.stdout) if name.startswith("dcp_") or name in ("torch", "numpy")}
    assert ours == {"dcp_base"}
