"""`KeeperStore`: a folder of objects in a keeper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

from dcp_base import InvalidPlaceError
from dcp_io import Entry, HostStore, Sink, Source, Store, check_name
from dcp_io import open_store as open_any
from dcp_manifest import CheckpointNotFoundError
from dcp_manifest.types import Buffer
from dcp_memory.client.connection import Connection, Lender, connection_to
from dcp_memory.client.link import Answer, NoKeeperError, check_options
from dcp_memory.client.objects import SMALL_BYTES, BlobSource, KeeperSink, KeeperSource, Writing
from dcp_memory.places import check_run


class KeeperStore(HostStore):
    """A store in the memory of a keeper, a process of this host that outlives the processes which save.

    Guarantees: those of `Store`, among the processes of one user on one host, as long as the keeper lives. Nothing is
    durable: `sync` has no effect. Writing starts a keeper if none runs; reading does not.

    Example:
        ```python
        from dcp_memory import stop_keeper
        from dcp_memory.client.store import KeeperStore

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
        self._url = _keeper_uri(check_run(run), folder)
        self._run, self._folder = _parse_uri(self._url)
        self._options = check_options(storage_options)

    @property
    def url(self) -> str:
        """URI of the folder."""
        return self._url

    def make(self) -> None:
        """Start a keeper if there is none."""
        self._connection().link.insist(self._options, {"do": "stay"})

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Create an object, which appears when its sink is closed."""
        del sync
        key = self._key(name)
        writing = Writing(self._connection(), self._options, key, f"{self._url}/{name}")
        return KeeperSink(name, writing, lambda: self.delete(name))

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Create or replace an object atomically."""
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
        """Open the object, which is kept until the source is closed, even if it is deleted."""
        answer = self._find({"do": "open", "key": self._key(name)}, name)
        if answer.fields["small"]:
            return BlobSource(name, answer.payload)
        size, number = answer.fields["size"], answer.fields["id"]
        return KeeperSource(name, self._connection(), answer.epoch, number, size, answer.payload)

    def size_here(self, name: str) -> int:
        """Return the size in bytes."""
        size: int = self._find({"do": "stat", "key": self._key(name)}, name).fields["size"]
        return size

    def exists(self, name: str) -> bool:
        """Return whether the object is complete."""
        answer = self._ask({"do": "stat", "key": self._key(name)})
        return answer is not None and "error" not in answer.fields

    def list(self) -> list[Entry]:
        """List the objects; empty without a keeper."""
        answer = self._ask({"do": "list", "folder": self._folder})
        if answer is None:
            return []
        return [Entry(name, size, mtime) for name, size, mtime in json.loads(bytes(answer.payload))]

    def delete(self, name: str) -> None:
        """Remove the object."""
        self._ask({"do": "delete", "key": self._key(name)})

    def sync_folder(self) -> None:
        """Do nothing."""

    def lender(self) -> Lender:
        """Return the lender of the keeper's memory: bytes staged there are not copied again."""
        return self._connection().lender(self._options)

    def child(self, name: str) -> KeeperStore:
        """Return the store of a subfolder, here and in `also`."""
        also = self.also_below(name)
        return KeeperStore(self._run, self._key(name), also=also, storage_options=self._options)

    def parent(self) -> KeeperStore:
        """Return the store above, without other stores; the top returns itself."""
        return KeeperStore(self._run, self._folder.rpartition("/")[0], storage_options=self._options)

    def folders(self) -> tuple[str, ...]:
        """Return the subfolders with objects."""
        answer = self._ask({"do": "folders", "folder": self._folder})
        return () if answer is None else tuple(json.loads(bytes(answer.payload)))

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._folder}/{name}" if self._folder else name

    def _connection(self) -> Connection:
        return connection_to(self._run)

    def _ask(self, fields: Mapping[str, Any]) -> Answer | None:
        try:
            return self._connection().link.ask(fields)
        except NoKeeperError:
            return None

    def _find(self, fields: Mapping[str, Any], name: str) -> Answer:
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
    """Open a `keeper://` URI, for `dcp_io.open_store`."""
    own, also = HostStore.split(uri)
    run, folder = _parse_uri(own)
    return KeeperStore(run, folder, also=[open_any(one) for one in also], storage_options=storage_options)


_SCHEME = "keeper"


def _keeper_uri(run: str, folder: str = "") -> str:
    path = "/" + quote(folder, errors="surrogatepass") if folder else ""
    return f"{_SCHEME}://{run}{path}"


def _parse_uri(uri: str) -> tuple[str, str]:
    place = uri.partition("://")[2]
    run, _, folder = place.partition("/")
    try:
        check_run(run)
    except ValueError as error:
        raise InvalidPlaceError(f"{uri!r} names no run of a keeper: {error}") from None
    folder = "/".join(part for part in unquote(folder, errors="surrogatepass").split("/") if part)
    return run, check_name(folder) if folder else ""
