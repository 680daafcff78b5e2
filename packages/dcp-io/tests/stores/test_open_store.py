"""Stores by URI: those that are found, and the errors for those that are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_base import ANY_SCHEME, PluginRegistry, StoreSpec, hookimpl, installed
from dcp_base.errors import DcpError, PluginNotFoundError
from dcp_base.schemes import scheme_of
from dcp_io import LocalStore, open_store
from dcp_io.stores.open_store import file_at


@pytest.mark.parametrize(
    ("uri", "scheme"), [("a/b", "file"), (Path("/x"), "file"), ("S3://b/c", "s3"), ("file:///x", "file")]
)
def test_schemes(uri: str | Path, scheme: str) -> None:
    assert scheme_of(uri) == scheme


def test_folders_of_the_file_system(tmp_path: Path) -> None:
    for uri in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}", f"FILE://{tmp_path}"):
        store = open_store(uri)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path)
    with pytest.raises(ValueError, match="storage_options"):
        open_store(tmp_path, storage_options={"endpoint": "x"})


def test_a_file_is_found_by_its_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.tiers.toml").touch()
    monkeypatch.chdir(tmp_path)
    for uri in ("run.tiers.toml", "./run.tiers.toml", str(tmp_path / "run.tiers.toml")):
        found = file_at(uri)
        assert found is not None
        assert (found[0].url, found[1]) == (str(tmp_path), "run.tiers.toml")
    assert [file_at(uri) for uri in ("missing.toml", "/missing.toml", "")] == [None] * 3


class Plugin:
    """Plug-in that registers functions of this module as stores, by scheme."""

    def __init__(self, *specs: StoreSpec) -> None:
        self._specs = specs

    @hookimpl
    def dcp_register_stores(self) -> tuple[StoreSpec, ...]:
        return self._specs


def made_by_fallback(uri: str, storage_options: object) -> Any:
    return "fallback", uri, storage_options


def made_by_better(uri: str, storage_options: object) -> Any:
    return "better", uri, storage_options


def refuse(uri: str, storage_options: object) -> None:
    del storage_options
    raise ValueError(f"nobody knows {uri}")


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`add(name, scheme, function)` registers a plug-in; installed plug-ins are hidden."""
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-nothing-installed")))
    monkeypatch.setitem(sys.modules, "openers_of_test", sys.modules[__name__])

    def add(name: str, *schemes: str, opener: str, fallback: bool = False) -> None:
        path = opener if ":" in opener else f"openers_of_test:{opener}"
        installed.register(Plugin(*(StoreSpec(scheme, path, fallback) for scheme in schemes)), name=name)

    return add


def test_packages_bring_stores_by_scheme(add: Callable[..., None]) -> None:
    with pytest.raises(PluginNotFoundError, match="toy:// stores; install dcp-fsspec"):
        open_store("toy://x")
    with pytest.raises(PluginNotFoundError, match="install dcp-object"):
        open_store("s3://x")
    add("one", "toy", ANY_SCHEME, opener="made_by_fallback", fallback=True)
    assert _as_any(open_store("toy://x", storage_options={"a": 1})) == ("fallback", "toy://x", {"a": 1})
    assert _as_any(open_store("unnamed://x")) == ("fallback", "unnamed://x", None)
    add("two", "toy", opener="made_by_better")
    assert _as_any(open_store("TOY://x")) == ("better", "TOY://x", None)
    add("three", "toy", opener="made_by_fallback")
    with pytest.raises(DcpError, match=r"'two'.*'three'.*uninstall one of them"):
        open_store("toy://x")


def test_a_scheme_that_no_fallback_knows(add: Callable[..., None]) -> None:
    add("picky", ANY_SCHEME, opener="refuse")
    with pytest.raises(PluginNotFoundError, match=r"opens other:// stores; .*nobody knows other://x") as caught:
        open_store("other://x")
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(PluginNotFoundError, match=r"'1' is not a scheme; for a path of that name write \./1://x"):
        open_store("1://x")


def test_a_store_that_cannot_be_imported_says_what_to_install(add: Callable[..., None]) -> None:
    add("half", "toy", opener="no_such_module_anywhere:open_store")
    with pytest.raises(PluginNotFoundError, match="half opens such stores, and needs no_such_module_anywhere, which"):
        open_store("toy://x")
    add("wrong", "other", opener="no_such_function")
    with pytest.raises(PluginNotFoundError, match=r"other://x: .*'wrong'.*no_such_function"):
        open_store("other://x")


def test_a_plugin_that_is_broken_is_named_where_it_may_be_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, add: Callable[..., None]
) -> None:
    info = tmp_path / "bad-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[dcp-of-test]\nbad = no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-of-test")))
    with pytest.raises(PluginNotFoundError, match=r"install dcp-fsspec.*bad 1\.2.*no_such_module_anywhere"):
        open_store("toy://x")
    add("any", ANY_SCHEME, opener="made_by_fallback")
    assert _as_any(open_store("toy://x")) == ("fallback", "toy://x", None)


def _as_any(value: Any) -> Any:
    return value
