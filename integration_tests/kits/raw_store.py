"""`RawStore`: raw access through the store itself."""

from __future__ import annotations

from collections.abc import Iterator

from dcp_io.stores.store import SupportsFolders

__all__ = ["RawStore"]


class RawStore:
    """`RawFolder` over a store with its own connection."""

    def __init__(self, store: SupportsFolders) -> None:
        self._store = store

    def names(self) -> list[str]:
        return sorted(_names(self._store, ""))

    def get(self, name: str) -> bytes:
        return self._store.read(name)

    def put(self, name: str, data: bytes) -> None:
        self._store.publish(name, data)

    def delete(self, name: str) -> None:
        self._store.delete(name)


def _names(store: SupportsFolders, above: str) -> Iterator[str]:
    yield from (above + entry.name for entry in store.list())
    for name in store.folders():
        yield from _names(store.child(name), f"{above}{name}/")
