"""Discovery from folders that look like installed distributions."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_base import PluginRegistry, installed
from dcp_base.hookspecs import CheckpointEvent, StorageBackendSpec, hookimpl
from dcp_core import plugins
from dcp_core.errors import DcpError, PluginLoadError, PluginNotFoundError

# The environment may hold real plugins; only those of a test are in this group.
GROUP = "dcp-test-plugins"
HEAD = "from dcp_base import StorageBackendSpec, hookimpl\n"
STORAGE = """
@hookimpl
def dcp_register_storage():
    return [StorageBackendSpec("{scheme}", "{module}:Reader", "{module}:make.writer", ("atomic publish",))]
class Reader: ...
class make:
    writer = Reader
"""
EVENT = CheckpointEvent("save", "write", "finished", 0, "id", 1.5, 10)

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(name, code)` makes a distribution with a plugin module, found before everything else."""
    made: list[str] = []

    def install(name: str, code: str, entry: str | None = None) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry or name} = {name}_plugin\n")
        (tmp_path / f"{name}_plugin.py").write_text(HEAD + code)
        made.append(f"{name}_plugin")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry(GROUP)))
    yield install
    for name in made:
        sys.modules.pop(name, None)


def test_storage_by_scheme(install: Install) -> None:
    install("alpha", STORAGE.format(scheme="alpha", module="alpha_plugin"))
    install("local", STORAGE.format(scheme="file", module="local_plugin"))
    backend = plugins.storage_for("alpha://bucket/key")
    assert backend.spec.guarantees == ("atomic publish",)
    assert backend.load_reader() is sys.modules["alpha_plugin"].Reader
    assert backend.load_writer() is sys.modules["alpha_plugin"].Reader
    for path in ("/some/where", "relative", "file:///x", "FILE:///x"):
        assert plugins.storage_for(path).spec.scheme == "file"
    assert plugins.names("storage") == ("alpha", "file")
    assert [(info.name, info.distribution, info.error, info.offers) for info in plugins.list()] == [
        ("alpha", "alpha 1.2", None, {"storage": ("alpha",)}),
        ("local", "local 1.2", None, {"storage": ("file",)}),
    ]


@pytest.mark.parametrize("open_role", [plugins.open_reader, plugins.open_writer])
def test_readers_and_writers_by_id_with_options(install: Install, open_role: Callable[..., Any]) -> None:
    class_with_arguments = (
        "class Reader:\n    def __init__(self, *places, **options):\n        self.got = places, options"
    )
    code = STORAGE.replace("class Reader: ...", class_with_arguments)
    install("alpha", code.format(scheme="alpha", module="alpha_plugin"))
    install("local", code.format(scheme="file", module="local_plugin"))
    with_options = open_role("alpha://b", storage_options={"endpoint": "here"}, compression="auto")
    assert with_options.got == (("alpha://b",), {"storage_options": {"endpoint": "here"}, "compression": "auto"})
    assert open_role(Path("folder"), storage_options={}).got == ((Path("folder"),), {})
    with pytest.raises(ValueError, match=r"folder: a directory of the file system takes no storage_options.*endpoint"):
        open_role("folder", storage_options={"endpoint": "here"})


def test_a_storage_for_every_scheme_that_it_says_it_knows(install: Install) -> None:
    code = STORAGE.replace("class Reader: ...", "class Reader:\n    validate_checkpoint_id = lambda id: '://my' in id")
    install("any", code.format(scheme="*", module="any_plugin"))
    install("named", STORAGE.format(scheme="named", module="named_plugin"))
    assert plugins.storage_for("other://my/box").plugin.name == "any"
    assert plugins.storage_for("named://my/box").plugin.name == "named"
    for uri in ("other://box", "relative"):
        with pytest.raises(PluginNotFoundError, match=f"^Cannot detect .* {uri!r}: no .* storage") as caught:
            plugins.storage_for(uri)
        assert isinstance(caught.value, RuntimeError)  # stock's


def test_other_tables(install: Install) -> None:
    code = "@hookimpl\ndef dcp_register_{table}():\n    return {{'{name}': 'collections:OrderedDict'}}\n"
    tables: dict[str, tuple[str, Callable[[], object]]] = {
        "transforms": ("stream.zstd", lambda: plugins.transform("stream.zstd/1")),
        "state_adapters": ("fsdp", lambda: plugins.state_adapter("fsdp")),
        "converters": ("hf", lambda: plugins.converter("hf")),
    }
    install("many", "".join(code.format(table=table, name=name) for table, (name, _) in tables.items()))
    from collections import OrderedDict

    for name, ask in tables.values():
        assert ask() is OrderedDict, name


@pytest.mark.parametrize(
    ("ask", "package"),
    [
        (lambda: plugins.storage_for("/x"), "dcp-fs"),
        (lambda: plugins.storage_for("s3://x"), "dcp-object"),
        (lambda: plugins.storage_for("ftp://x"), "dcp-fsspec"),
        (lambda: plugins.transform("stream.zstd/1"), "dcp-transforms"),
        (lambda: plugins.state_adapter("fsdp"), "dcp-state"),
        (lambda: plugins.converter("hf"), "dcp-format"),
    ],
)
def test_what_is_missing_names_the_package(install: Install, ask: Callable[[], object], package: str) -> None:
    with pytest.raises(PluginNotFoundError, match=f"install {package}, from"):
        ask()


BROKEN = {
    "import": "import no_such_module_anywhere\n",
    "raise": "raise RuntimeError('at import')\n",
    "hook raises": "@hookimpl\ndef dcp_register_storage():\n    raise OSError('in hook')\n",
    "unknown hook": "@hookimpl\ndef dcp_register_nothing(): ...\n",
    "wrong argument": "@hookimpl\ndef dcp_on_event(happening): ...\n",
    "wrong record": "@hookimpl\ndef dcp_register_storage():\n    return ['s3']\n",
    "wrong mapping": "@hookimpl\ndef dcp_register_transforms():\n    return {'x': 3}\n",
    "wrong path": "@hookimpl\ndef dcp_register_transforms():\n    return {'x': 'module.attribute'}\n",
    "one name twice": "@hookimpl\ndef dcp_register_storage():\n"
    "    return [StorageBackendSpec('x', 'a:b', 'c:d'), StorageBackendSpec('x', 'a:b', 'c:d')]\n",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_plugin_is_listed_and_raises_only_when_it_may_be_needed(install: Install, how: str) -> None:
    install("bad", BROKEN[how])
    install("good", STORAGE.format(scheme="good", module="good_plugin"))
    assert plugins.storage_for("good://x").load_reader()
    plugins.emit(EVENT)
    (bad,) = [info for info in plugins.list() if info.name == "bad"]
    assert bad.error
    with pytest.raises(PluginLoadError, match=r"bad 1\.2.*" + bad.error.split(":")[0]):
        plugins.storage_for("other://x")


def test_a_factory_that_cannot_be_imported_names_the_plugin(install: Install) -> None:
    install("half", STORAGE.format(scheme="half", module="half_nowhere"))
    with pytest.raises(PluginLoadError, match=r"half 1\.2.*half_nowhere:Reader"):
        plugins.storage_for("half://x").load_reader()


def test_the_same_name_twice_names_both(install: Install) -> None:
    install("one", STORAGE.format(scheme="s3", module="one_plugin"))
    install("two", STORAGE.format(scheme="s3", module="two_plugin"))
    install("three", STORAGE.format(scheme="gs", module="three_plugin"))
    assert plugins.storage_for("gs://x")
    with pytest.raises(DcpError, match=r"one 1\.2.*two 1\.2"):
        plugins.storage_for("s3://x")


def test_the_group_is_dcp() -> None:
    assert PluginRegistry()._group == "dcp"


def test_discovery_is_lazy_and_happens_once(install: Install) -> None:
    install("alpha", STORAGE.format(scheme="alpha", module="alpha_plugin"))
    assert "alpha_plugin" not in sys.modules
    assert plugins.list()
    install("beta", STORAGE.format(scheme="beta", module="beta_plugin"))
    assert len(plugins.list()) == 1


def test_observers_never_fail_the_caller(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[CheckpointEvent] = []

    class Watcher:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            seen.append(event)

    class Silent:
        @hookimpl
        def dcp_on_event(self) -> None:
            seen.append(EVENT)

    class Failing:
        @hookimpl
        def dcp_on_event(self, event: CheckpointEvent) -> None:
            raise RuntimeError("observer broke")

    for plugin in (Watcher(), Failing(), Silent()):
        plugins.register(plugin, name=type(plugin).__name__)
    with caplog.at_level(logging.WARNING, "dcp_base"):
        plugins.emit(EVENT)
    assert seen == [EVENT, EVENT]
    assert "Failing" in caplog.text
    assert "observer broke" in caplog.text


def test_plugins_by_hand(install: Install) -> None:
    class Own:
        @hookimpl
        def dcp_register_storage(self) -> list[StorageBackendSpec]:
            return [StorageBackendSpec("own", "io:BytesIO", "io:BytesIO")]

    plugins.register(Own(), name="mine")
    assert plugins.storage_for("own://x").plugin.distribution is None
    plugins.unregister("mine")
    with pytest.raises(PluginNotFoundError):
        plugins.storage_for("own://x")
    with pytest.raises(PluginNotFoundError):
        plugins.unregister("mine")

    class Wrong:
        @hookimpl
        def dcp_register_storage(self) -> None:
            raise ValueError("no")

    with pytest.raises(PluginLoadError, match="'wrong' is not valid"):
        plugins.register(Wrong(), name="wrong")
    assert plugins.list() == ()


FALLBACK = (
    "from dcp_base import StorageBackendSpec\n@hookimpl\ndef dcp_register_storage():\n"
    "    return [StorageBackendSpec('toy', 'x:{name}', 'x:{name}', fallback={fallback})]\n"
)


def test_fallbacks_stand_back(install: Install) -> None:
    install("fallback", FALLBACK.format(name="Fallback", fallback=True))
    assert plugins.storage_for("toy://x").spec.reader == "x:Fallback"


def test_fallbacks_stand_back_for_others(install: Install) -> None:
    install("fallback", FALLBACK.format(name="Fallback", fallback=True))
    install("special", FALLBACK.format(name="Special", fallback=False))
    assert plugins.storage_for("toy://x").spec.reader == "x:Special"
