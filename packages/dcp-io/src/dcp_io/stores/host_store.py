"""Stores that each host of a job has for itself.

URIs may name folders with copies: `host:///path?also=s3%3A%2F%2Fbucket%2Frun`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from urllib.parse import parse_qsl, quote, unquote, urlencode

from dcp_base.errors import InvalidPlaceError
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Place, Source, Store, SupportsFolders, with_folders

HOST_SCHEME = "host"


def host_folder(path: str) -> str:
    """Return the path itself. Tests of several hosts replace this."""
    return path


def host_uri(path: str | os.PathLike[str], also: Sequence[str] = ()) -> str:
    """Return the URI of a host's folder; see `with_also`."""
    return with_also(f"{HOST_SCHEME}://{quote(os.path.abspath(path))}", also)


def host_path(uri: str) -> str:
    """Return the path in a URI; InvalidPlaceError if it is not absolute."""
    path = uri.partition("://")[2]
    if not path.startswith("/"):
        raise InvalidPlaceError(f"{uri!r} has no absolute path: write {HOST_SCHEME}:///path")
    return unquote(path)


def with_also(uri: str, also: Sequence[str]) -> str:
    """Add shared folders with copies, nearest first, to a URI."""
    return f"{uri}?{urlencode([('also', one) for one in also])}" if also else uri


class HostStore(SupportsFolders):
    """Base class of stores under a name by which each host of a job has its own store, such as its disk.

    Objects are written to this host's store. Missing objects are read from the stores in `also`, nearest first. A
    subclass implements `open_here` and `size_here` instead of `open` and `size`, `child`, `parent`, and the other
    abstract methods of `Store`. Its `exists` and `list` cover this host's objects only. Its package registers a
    function that opens its URIs (see `dcp_base.StoreSpec`) with `split`.

    Example:
        ```python
        from dcp_io import HostStore, open_store

        store = open_store("host:///nvme/run/step-40")
        assert isinstance(store, HostStore) and store.place == "host"
        assert store.uri(["/shared/run/step-40"]) == "host:///nvme/run/step-40?also=%2Fshared%2Frun%2Fstep-40"
        ```
    """

    def __init__(self, *, also: Sequence[Store] = ()) -> None:
        self.also = tuple(also)
        self._elsewhere: dict[str, int] = {}

    @property
    def place(self) -> Place:
        """`host`."""
        return "host"

    def uri(self, also: Sequence[str] = ()) -> str:
        """Return the folder's URI, with shared folders."""
        return with_also(self.url, also)

    @staticmethod
    def split(uri: str) -> tuple[str, list[str]]:
        """Split a URI of `uri` into the plain URI and the other folders."""
        own, _, query = uri.partition("?")
        return own, [value for key, value in parse_qsl(query) if key == "also"]

    def also_below(self, name: str) -> list[SupportsFolders]:
        """Return the stores of a subfolder in `also`."""
        return [with_folders(store).child(name) for store in self.also]

    @abstractmethod
    def child(self, name: str) -> HostStore:
        """Return a subfolder's store, also in `also`."""

    @abstractmethod
    def parent(self) -> HostStore:
        """Return the parent's store, without `also`."""

    @abstractmethod
    def open_here(self, name: str) -> Source:
        """Open this host's object."""

    @abstractmethod
    def size_here(self, name: str) -> int:
        """Return its size."""

    def read_elsewhere(self, names: Mapping[str, int]) -> None:
        """Read objects (name → index in `also`) elsewhere, since no host has them in full."""
        self._elsewhere = dict(names)

    def holding(self, names: Collection[str]) -> set[str]:
        """Return the names that this host has, or can read elsewhere because no host has them.

        Takes one listing, unless names contain a `/`.
        """
        listed = {entry.name for entry in self.list()}
        return {
            name for name in names if name in self._elsewhere or name in listed or ("/" in name and self.exists(name))
        }

    def read(self, name: str) -> bytes:
        """Read the object here, or its copy."""
        with closing(self.open(name)) as source:
            data = bytearray(source.size())
            source.read_into(0, [memoryview(data)])
            return bytes(data)

    def open(self, name: str) -> Source:
        """Open the object here, or its copy."""
        other = self._other_with(name)
        return self.open_here(name) if other is None else other.open(name)

    def size(self, name: str) -> int:
        """Return its size, or its copy's."""
        other = self._other_with(name)
        return self.size_here(name) if other is None else other.size(name)

    def _other_with(self, name: str) -> Store | None:
        if name in self._elsewhere:
            return self.also[self._elsewhere[name]]
        if not self.also or self.exists(name):
            return None
        return next((store for store in self.also if store.exists(name)), None)


class HostFolder(HostStore, LocalStore):
    """A folder of the local file system under a path where each host of a job has its own folder.

    Guarantees: those of `LocalStore`, among the processes of one host.
    """

    def __init__(self, path: str | os.PathLike[str], *, also: Sequence[Store] = ()) -> None:
        self._named = os.path.abspath(os.fspath(path))
        HostStore.__init__(self, also=also)
        LocalStore.__init__(self, host_folder(self._named))

    @property
    def url(self) -> str:
        """URI of the folder, without `also`."""
        return host_uri(self._named)

    def child(self, name: str) -> HostFolder:
        """Return a subfolder's store."""
        self._inside(name)
        return HostFolder(os.path.join(self._named, name), also=self.also_below(name))

    def parent(self) -> HostFolder:
        """Return the parent's store."""
        return HostFolder(os.path.dirname(self._named))

    def open_here(self, name: str) -> Source:
        """Open this host's file."""
        return LocalStore.open(self, name)

    def size_here(self, name: str) -> int:
        """Return the size of this host's file."""
        return LocalStore.size(self, name)

    def read(self, name: str) -> bytes:
        """Read the file here, or its copy."""
        return LocalStore.read(self, name)
