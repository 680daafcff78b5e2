"""`RawStore`: the objects of a folder through its own store, for storages whose objects nothing else can reach."""

from __future__ import annotations

from collections.abc import Iterator

from dcp_io.stores.store import Store

__all__ = ["RawStore"]


class RawStore:
    """Objects of a store, without readers and writers of checkpoints; a `RawFolder`.

    Args:
        store: Store of the folder, over a connection that nothing else uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def names(self) -> list[str]:
        """Return the names of all objects, those of folders below with their paths."""
        return sorted(_names(self._store, ""))

    def get(self, name: str) -> bytes:
        """Return the content of an object."""
        return self._store.read(name)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one that exists."""
        self._store.publish(name, data)

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._store.delete(name)


def _names(store: Store, above: str) -> Iterator[str]:
    yield from (above + entry.name for entry in store.list())
    for name in store.folders():
        yield from _names(store.child(name), f"{above}{name}/")
