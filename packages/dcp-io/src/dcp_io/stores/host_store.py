"""`HostStore`: base class of stores that each host of a job has for itself, and `HostFolder`, of URIs `host:///path`.

Ranks that read from such a store ask each other for their objects: its `place` is `host`. Objects that no host has any
more may be read from copies elsewhere, which the URI names: `host:///path?also=s3%3A%2F%2Fbucket%2Frun`.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from urllib.parse import parse_qsl, quote, unquote, urlencode

from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Place, Source, Store
from dcp_manifest.errors import InvalidPlaceError

__all__ = ["HOST_SCHEME", "HostFolder", "HostStore", "host_folder", "host_path", "host_uri", "split_also", "with_also"]

HOST_SCHEME = "host"


def host_folder(path: str) -> str:
    """Return the folder of this host that a path names: the path itself. Tests of several hosts on one replace this."""
    return path


def host_uri(path: str | os.PathLike[str], also: Sequence[str] = ()) -> str:
    """Return the URI of a folder that each host has for itself.

    Args:
        path: Path of the folder, the same on all hosts.
        also: Paths or URIs of folders that all hosts share, with copies of the same objects, the nearest first.
    """
    return with_also(f"{HOST_SCHEME}://{quote(os.path.abspath(path))}", also)


def host_path(uri: str) -> str:
    """Return the path in a URI that `host_uri` made, without other folders.

    Raises:
        InvalidPlaceError: The URI has no absolute path.
    """
    path = uri.partition("://")[2]
    if not path.startswith("/"):
        raise InvalidPlaceError(f"{uri!r} has no absolute path: write {HOST_SCHEME}:///path")
    return unquote(path)


def with_also(uri: str, also: Sequence[str]) -> str:
    """Return the URI of a store of each host, with the folders in a query that have copies of its objects.

    Args:
        uri: The URI without a query.
        also: Paths or URIs of folders that all hosts share, the nearest first; the URI is unchanged if there are none.
    """
    return f"{uri}?{urlencode([('also', one) for one in also])}" if also else uri


def split_also(uri: str) -> tuple[str, list[str]]:
    """Return a URI that `with_also` made without the other folders, and the paths or URIs of those."""
    own, _, query = uri.partition("?")
    return own, [value for key, value in parse_qsl(query) if key == "also"]


class HostStore(Store):
    """Base class of stores under a name by which each host of a job has a store of its own, such as its disk.

    Objects are written to this host's store. An object that it lacks is read from the stores in `also`. A subclass
    implements `open_here` and `size_here` instead of `open` and `size`, `child`, `parent`, and the other abstract
    methods of `Store`, of which `exists` and `list` are about this host's objects alone. Its package registers a
    function that opens its URIs (see `dcp_hooks.StoreSpec`), with `split_also` for the stores in `also`.

    Args:
        also: Stores that all hosts share, with copies of objects, the nearest first.

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
        """Stores that all hosts share, with copies of objects."""
        self._elsewhere: dict[str, int] = {}

    @property
    def place(self) -> Place:
        """`host`."""
        return "host"

    def uri(self, also: Sequence[str] = ()) -> str:
        """Return the URI of this folder, with other folders that have copies of its objects.

        Args:
            also: Paths or URIs of folders that all hosts share, the nearest first.
        """
        return with_also(self.url, also)

    @abstractmethod
    def child(self, name: str) -> HostStore:
        """Return a store for the subfolder of that name, here and in the stores in `also`."""

    @abstractmethod
    def parent(self) -> HostStore:
        """Return the store of the folder above, without other folders."""

    @abstractmethod
    def open_here(self, name: str) -> Source:
        """Open this host's object of that name for reading. Errors: see `Store.open`."""

    @abstractmethod
    def size_here(self, name: str) -> int:
        """Return the size of this host's object of that name in bytes. Errors: see `Store.size`."""

    def read_elsewhere(self, names: Mapping[str, int]) -> None:
        """Read objects from other folders from now on, since no host of this job has them in full length.

        Args:
            names: Name of the object → number of the folder in `also`.
        """
        self._elsewhere = dict(names)

    def holding(self, names: Collection[str]) -> set[str]:
        """Return which of the objects this host has, and those that no host has, which each can read elsewhere."""
        here = super().holding([name for name in names if name not in self._elsewhere])
        return here | {name for name in names if name in self._elsewhere}

    def read(self, name: str) -> bytes:
        """Read all bytes of the object on this host, or of the copy elsewhere."""
        with closing(self.open(name)) as source:
            return bytes(source.fetch(0, source.size()))

    def open(self, name: str) -> Source:
        """Open the object on this host, or where a copy is if this host has none."""
        other = self._other_with(name)
        return self.open_here(name) if other is None else other.open(name)

    def size(self, name: str) -> int:
        """Return the size of the object on this host, or of the copy elsewhere."""
        other = self._other_with(name)
        return self.size_here(name) if other is None else other.size(name)

    def _other_with(self, name: str) -> Store | None:
        """Return the store elsewhere from which an object is read; None for this host's."""
        if name in self._elsewhere:
            return self.also[self._elsewhere[name]]
        if not self.also or self.exists(name):
            return None
        return next((store for store in self.also if store.exists(name)), None)


class HostFolder(HostStore, LocalStore):
    """A folder of the local file system under a path where each host of a job has a folder of its own.

    Guarantees: those of `LocalStore`, among the processes of one host. Objects are written to this host's folder.

    Args:
        path: Path of the folder, the same on all hosts.
        also: Stores that all hosts share, with copies of objects; what the folder lacks is read there, nearest first.

    Example:
        ```python
        from dcp_io import HostFolder, open_store

        store = HostFolder("/nvme/run/step-40")
        assert store.url == "host:///nvme/run/step-40" and store.place == "host"
        assert open_store(store.url).url == store.url
        ```
    """

    def __init__(self, path: str | os.PathLike[str], *, also: Sequence[Store] = ()) -> None:
        self._named = os.path.abspath(os.fspath(path))
        HostStore.__init__(self, also=also)
        LocalStore.__init__(self, host_folder(self._named))

    @property
    def url(self) -> str:
        """The URI of the folder, without the other folders."""
        return host_uri(self._named)

    def child(self, name: str) -> HostFolder:
        """Return a store for the subfolder of that name, here and in the stores in `also`."""
        self._inside(name)
        return HostFolder(os.path.join(self._named, name), also=[store.child(name) for store in self.also])

    def parent(self) -> HostFolder:
        """Return the store of the folder above, without other folders."""
        return HostFolder(os.path.dirname(self._named))

    def open_here(self, name: str) -> Source:
        """Open this host's file for reading."""
        return LocalStore.open(self, name)

    def size_here(self, name: str) -> int:
        """Return the size of this host's file in bytes."""
        return LocalStore.size(self, name)

    def read(self, name: str) -> bytes:
        """Read all bytes of the file on this host, or of the copy elsewhere."""
        return LocalStore.read(self, name)
