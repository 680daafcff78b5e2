"""Imports by name: front doors, and parts that may be missing or broken."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dcp_base
from dcp_base import PluginLoadError, PluginNotFoundError, imports

FRONT_DOOR = """
from dcp_base import import_lazily

__getattr__, __dir__ = import_lazily(__name__, {"toybox.first_room": ("first",), "toybox.other_room": ("other",)})
"""


@pytest.fixture
def toybox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "toybox"
    folder.mkdir()
    (folder / "__init__.py").write_text(FRONT_DOOR)
    (folder / "first_room.py").write_text("first = object()\n")
    (folder / "other_room.py").write_text("raise ImportError('this room is closed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "toybox"
    for name in [each for each in sys.modules if each.split(".")[0] == "toybox"]:
        del sys.modules[name]


def test_a_module_is_imported_with_its_first_name(toybox: str) -> None:
    package = importlib.import_module(toybox)
    assert "toybox.first_room" not in sys.modules
    assert "first" not in vars(package)
    assert package.first is importlib.import_module("toybox.first_room").first
    assert vars(package)["first"] is package.first
    assert "toybox.other_room" not in sys.modules
    with pytest.raises(ImportError, match="this room is closed"):
        _ = package.other


def test_names_are_listed_before_they_are_imported(toybox: str) -> None:
    package = importlib.import_module(toybox)
    assert {"first", "other", "__all__"} <= {*dir(package)}
    assert package.__all__ == ["first", "other"]
    with pytest.raises(AttributeError, match="'toybox' has no attribute 'third'"):
        _ = package.third
    with pytest.raises(ImportError, match="third"):
        exec("from toybox import third")


def test_names_under_another_name_and_submodules(toybox: str, tmp_path: Path) -> None:
    homes = '{"toybox": ("first_room", "other_room"), "toybox.first_room": ("first as one",)}'
    (tmp_path / "toybox" / "__init__.py").write_text(
        f"from dcp_base import import_lazily\n__getattr__, __dir__ = import_lazily(__name__, {homes})\n"
    )
    package = importlib.import_module(toybox)
    assert {"first_room", "other_room", "one"} <= {*dir(package)}
    assert "first" not in dir(package)
    assert package.one is importlib.import_module("toybox.first_room").first
    assert package.first_room is sys.modules["toybox.first_room"]
    with pytest.raises(ImportError, match="this room is closed"):
        _ = package.other_room
    with pytest.raises(AttributeError, match="has no attribute 'first'"):
        _ = package.first


def test_all_names_of_this_package_are_there() -> None:
    assert all(getattr(dcp_base, name) is not None for name in dcp_base.__all__)


@pytest.mark.parametrize("part", imports.PARTS)
def test_a_missing_package_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda name: None)
    assert not imports.is_installed(part)
    package = imports.PARTS[part][0].partition(".")[0].replace("_", "-")
    with pytest.raises(PluginNotFoundError, match=f"^{package} is not installed.*Install {package}, from the source"):
        imports.import_part(part)


@pytest.mark.parametrize("text", ["import no_such_module_anywhere", "1 / 0", "another = 1"])
def test_a_broken_package_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dcp_broken").mkdir()
    (tmp_path / "dcp_broken" / "front.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(imports, "PARTS", {"x": ("dcp_broken.front:part", "Breaks.")})
    with pytest.raises(PluginLoadError, match=r"dcp-broken names .*:part, which cannot be imported") as caught:
        imports.import_part("x")
    assert caught.value.__cause__ is not None
    for name in ("dcp_broken", "dcp_broken.front"):
        sys.modules.pop(name, None)
