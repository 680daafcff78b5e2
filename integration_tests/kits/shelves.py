"""`ShelfStore`: a host's store that is not a folder with a path, for tests of code for any such store.

A different `DCP_SHELF_DIR` in each process simulates several hosts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_base import StorageBackendSpec, StoreSpec, hookimpl
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.open_store import open_store
from dcp_io.stores.store import Entry, Sink, Source, Store
from dcp_manifest.types import Buffer

__all__ = ["FOLDER_VARIABLE", "SHELF_SCHEME", "ShelfPlugin", "ShelfStore", "open_shelf"]

SHELF_SCHEME = "shelf"
FOLDER_VARIABLE = "DCP_SHELF_DIR"
"""Variable with this host's folder, read when a store is made."""


class ShelfStore(HostStore):
    """A host's store with the URI `shelf://name/folder`. Its objects are files, but it is not a `LocalStore`.

    Example:
        ```python
        import os
        from integration_tests.kits.shelves import ShelfStore

        os.environ["DCP_SHELF_DIR"] = "host-a"
        store = ShelfStore("run")
        store.make()
        store.publish("current", b"step 40")
        assert store.url == "shelf://run" and store.read("current") == b"step 40"
        ```
    """

    def __init__(self, name: str, *, also: Sequence[Store] = ()) -> None:
        super().__init__(also=also)
        self._name = name
        self._files = LocalStore(os.path.join(os.environ[FOLDER_VARIABLE], name))

    @property
    def url(self) -> str:
        return f"{SHELF_SCHEME}://{self._name}"

    def child(self, name: str) -> ShelfStore:
        self._files.child(name)  # which checks the name
        return ShelfStore(f"{self._name}/{name}", also=self.also_below(name))

    def parent(self) -> ShelfStore:
        return ShelfStore(self._name.rpartition("/")[0])

    def open_here(self, name: str) -> Source:
        return self._files.open(name)

    def size_here(self, name: str) -> int:
        return self._files.size(name)

    def make(self) -> None:
        self._files.make()

    def create(self, name: str, *, sync: bool = True) -> Sink:
        return self._files.create(name, sync=sync)

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        self._files.publish(name, data, tag=tag, sync=sync)

    def touch(self, name: str) -> None:
        self._files.touch(name)

    def exists(self, name: str) -> bool:
        return self._files.exists(name)

    def list(self) -> list[Entry]:
        return self._files.list()

    def delete(self, name: str) -> None:
        self._files.delete(name)

    def sync_folder(self) -> None:
        self._files.sync_folder()

    def folders(self) -> tuple[str, ...]:
        return self._files.folders()

    def remove_folder(self) -> None:
        self._files.remove_folder()


def open_shelf(uri: str, *, storage_options: Mapping[str, Any] | None = None) -> ShelfStore:
    """Open a URI `shelf://name/folder?also=…`; takes no options."""
    del storage_options
    own, also = HostStore.split(uri)
    return ShelfStore(own.partition("://")[2].rstrip("/"), also=[open_store(one) for one in also])


class ShelfPlugin:
    """Plug-in that opens shelves; for `dcp_base.installed.register`."""

    @hookimpl
    def dcp_register_stores(self) -> list[StoreSpec]:
        return [StoreSpec(SHELF_SCHEME, "integration_tests.kits.shelves:open_shelf")]

    @hookimpl
    def dcp_register_storage(self) -> list[StorageBackendSpec]:
        reader = "dcp_core.hosts.host_storage:HostStorageReader"
        writer = "dcp_core.hosts.host_storage:HostStorageWriter"
        return [StorageBackendSpec(SHELF_SCHEME, reader, writer)]
