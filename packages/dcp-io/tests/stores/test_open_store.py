"""Stores by URI: what is found, and what is said of what is not."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from dcp_io import LocalStore, StoreNotFoundError, open_store, scheme_of


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


def test_packages_bring_stores_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points: dict[str, list[importlib.metadata.EntryPoint]] = {"dcp.stores": [], "dcp.stores.fallback": []}

    def entry_points(*, group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
        return [point for point in points[group] if name in (None, point.name)]

    def add(group: str, value: str) -> None:
        points[group].append(importlib.metadata.EntryPoint("toy", value, group))

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    with pytest.raises(StoreNotFoundError, match="toy:// stores; pip install dcp-fsspec"):
        open_store("toy://x")
    with pytest.raises(StoreNotFoundError, match="pip install dcp-object"):
        open_store("s3://x")
    add("dcp.stores.fallback", "fallback:make")
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda point: _maker(point.value))
    assert _as_any(open_store("toy://x", storage_options={"a": 1})) == ("fallback:make", "toy://x", {"a": 1})
    assert _as_any(open_store("unnamed://x")) == ("fallback:make", "unnamed://x", None)
    add("dcp.stores", "better:make")
    assert _as_any(open_store("TOY://x")) == ("better:make", "TOY://x", None)
    add("dcp.stores", "other:make")
    with pytest.raises(StoreNotFoundError, match="uninstall one of them"):
        open_store("toy://x")


def test_a_scheme_that_no_fallback_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: str, storage_options: object) -> None:
        del storage_options
        raise ValueError(f"nobody knows {uri}")

    point = importlib.metadata.EntryPoint("toy", "fallback:make", "dcp.stores.fallback")
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group, name=None: [] if name else [point] * (len(group) > 10)
    )
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda point: refuse)
    with pytest.raises(StoreNotFoundError, match=r"opens other:// stores; .*nobody knows other://x") as caught:
        open_store("other://x")
    assert isinstance(caught.value, RuntimeError)


def _maker(value: str) -> Any:
    return lambda uri, storage_options: (value, uri, storage_options)


def _as_any(value: Any) -> Any:
    return value
