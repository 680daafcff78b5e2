"""`KeeperStore`: a folder of objects in the keeper of a run on this host; URIs `keeper://RUN/folder`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_io import Entry, HostStore, Sink, Source, Store, check_name, split_also
from dcp_io import open_store as open_any
from dcp_manifest import CheckpointNotFoundError
from dcp_memory.client.keepers import Connection, connection_to
from dcp_memory.client.lender import Lender
from dcp_memory.client.link import Answer, NoKeeperError
from dcp_memory.client.sink import SMALL_BYTES, KeeperSink, Writing
from dcp_memory.client.source import BlobSource, KeeperSource
from dcp_memory.client.uris import keeper_uri, parse_uri
from dcp_memory.places import check_run
from dcp_memory.starting import check_options

__all__ = ["KeeperStore", "open_store"]

Buffer = bytes | bytearray | memoryview


class KeeperStore(HostStore):
    """A store in the memory of a keeper, a process of this host that outlives the processes which save.

    Guarantees: those of `Store`, among the processes of one user on one host, as long as the keeper lives. Nothing is
    durable: `sync` has no effect. Writing starts a keeper if there is none; reading does not.

    Args:
        run: Name of the run, which has a keeper of its own: letters, digits and `._-`.
        folder: Folder in the keeper; empty for the top.
        also: Stores that all hosts share, with copies of objects; what the keeper lacks is read there, nearest first.
        storage_options: Options of a keeper that is started here: `max_bytes`, `generations`, `idle_seconds`,
            `with_parent`; see `start_keeper`.

    Example:
        ```python
        from dcp_memory import KeeperStore, stop_keeper

        store = KeeperStore("example", "step-40")
        store.make()
        store.publish("note", b"kept while trainers come and go")
        assert store.read("note").startswith(b"kept")
        stop_keeper("example")
        assert store.list() == []
        ```
    """

    def __init__(
        self,
        run: str,
        folder: str = "",
        *,
        also: Sequence[Store] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(also=also)
        self._url = keeper_uri(check_run(run), folder)
        self._run, self._folder = parse_uri(self._url)
        self._options = check_options(storage_options)

    @property
    def url(self) -> str:
        """The URI of the folder, without the other stores."""
        return self._url

    def make(self) -> None:
        """Start a keeper if there is none; folders need not be made."""
        self._connection().link.insist(self._options, {"do": "stay"})

    def create(self, name: str) -> Sink:
        """Create an object for writing, which appears when its sink is closed; see `KeeperSink`."""
        key = self._key(name)
        writing = Writing(self._connection(), self._options, key, f"{self._url}/{name}")
        return KeeperSink(name, writing, lambda: self.delete(name))

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Create or replace an object, atomically."""
        del tag, sync
        key, connection = self._key(name), self._connection()
        if len(data) <= SMALL_BYTES:
            connection.link.insist(self._options, {"do": "publish", "key": key}, memoryview(data))
            return
        writing = Writing(connection, self._options, None, f"{self._url}/{name}")
        try:
            writing.write([data])
            writing.commit(key)
        except BaseException:
            writing.drop()
            raise

    def touch(self, name: str) -> None:
        """Set the modification time to now."""
        self._find({"do": "touch", "key": self._key(name)}, name)

    def open_here(self, name: str) -> Source:
        """Open the object; the keeper keeps it until the source is closed, even if it is deleted."""
        answer = self._find({"do": "open", "key": self._key(name)}, name)
        if answer.fields["small"]:
            return BlobSource(self, name, answer.payload)
        size, number = answer.fields["size"], answer.fields["id"]
        return KeeperSource(self, name, self._connection(), answer.epoch, number, size, answer.payload)

    def size_here(self, name: str) -> int:
        """Return the size of the object in bytes."""
        size: int = self._find({"do": "stat", "key": self._key(name)}, name).fields["size"]
        return size

    def exists(self, name: str) -> bool:
        """Return whether the object exists; one that is being written does not yet."""
        answer = self._ask({"do": "stat", "key": self._key(name)})
        return answer is not None and "error" not in answer.fields

    def list(self) -> list[Entry]:
        """List the objects in the folder; empty if there is no keeper."""
        answer = self._ask({"do": "list", "folder": self._folder})
        if answer is None:
            return []
        return [Entry(name, size, mtime) for name, size, mtime in json.loads(bytes(answer.payload))]

    def delete(self, name: str) -> None:
        """Remove the object."""
        self._ask({"do": "delete", "key": self._key(name)})

    def sync_folder(self) -> None:
        """Do nothing: memory has no way to be durable."""

    def lender(self) -> Lender:
        """Return the lender of the keeper's memory: what savers stage there is not copied again."""
        return self._connection().lender(self._options)

    def child(self, name: str) -> KeeperStore:
        """Return a store for the subfolder of that name, here and in the stores in `also`."""
        also = [store.child(name) for store in self.also]
        return KeeperStore(self._run, self._key(name), also=also, storage_options=self._options)

    def parent(self) -> KeeperStore:
        """Return the store of the folder above, without other stores; that of the top is itself."""
        return KeeperStore(self._run, self._folder.rpartition("/")[0], storage_options=self._options)

    def folders(self) -> tuple[str, ...]:
        """Return the names of the subfolders with objects."""
        answer = self._ask({"do": "folders", "folder": self._folder})
        return () if answer is None else tuple(json.loads(bytes(answer.payload)))

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._folder}/{name}" if self._folder else name

    def _connection(self) -> Connection:
        return connection_to(self._run)

    def _ask(self, fields: Mapping[str, Any]) -> Answer | None:
        """Ask the keeper; None if there is none."""
        try:
            return self._connection().link.ask(fields)
        except NoKeeperError:
            return None

    def _find(self, fields: Mapping[str, Any], name: str) -> Answer:
        """Ask the keeper about an object that must be there."""
        answer = self._ask(fields)
        if answer is None:
            raise CheckpointNotFoundError(
                f"{self._url}/{name} is missing: no keeper of {self._run} runs on this host, for this user; what one "
                "held before is lost: load from another storage"
            )
        if "error" in answer.fields:
            raise CheckpointNotFoundError(f"{self._url}/{name} is missing; the checkpoint is incomplete or was removed")
        return answer


def open_store(uri: str, *, storage_options: Mapping[str, Any] | None = None) -> KeeperStore:
    """Open the store of a `keeper://` URI; for `dcp_io.open_store`, which finds it by its scheme."""
    own, also = split_also(uri)
    run, folder = parse_uri(own)
    return KeeperStore(run, folder, also=[open_any(one) for one in also], storage_options=storage_options)
