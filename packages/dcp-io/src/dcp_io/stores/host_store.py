"""`HostStore`: a folder that each host has for itself, under the same path; URIs `host:///path`.

Several ranks that read from it ask each other who has what: its `place` is `host`. What no host has any more may be
read from copies elsewhere, which the URI names: `host:///path?also=s3%3A%2F%2Fbucket%2Frun`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import parse_qsl, quote, unquote, urlencode

from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Place, Source, Store
from dcp_manifest.errors import InvalidPlaceError

__all__ = ["HOST_SCHEME", "HostStore", "host_folder", "host_uri", "parse_host_uri"]

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
    query = f"?{urlencode([('also', one) for one in also])}" if also else ""
    return f"{HOST_SCHEME}://{quote(os.path.abspath(path))}{query}"


def parse_host_uri(uri: str) -> tuple[str, list[str]]:
    """Return the path in a URI that `host_uri` made, and the paths or URIs of the other folders.

    Raises:
        InvalidPlaceError: The URI has no absolute path.
    """
    path, _, query = uri.partition("://")[2].partition("?")
    if not path.startswith("/"):
        raise InvalidPlaceError(f"{uri!r} has no absolute path: write {HOST_SCHEME}:///path")
    return unquote(path), [value for key, value in parse_qsl(query) if key == "also"]


class HostStore(LocalStore):
    """A folder of the local file system under a path where each host of a job has a folder of its own.

    Guarantees: those of `LocalStore`, among the processes of one host. Objects are written to this host's folder.

    Args:
        path: Path of the folder, the same on all hosts.
        also: Stores that all hosts share, with copies of objects; what the folder lacks is read there, nearest first.

    Example:
        ```python
        from dcp_io import HostStore, open_store

        store = HostStore("/nvme/run/step-40")
        assert store.url == "host:///nvme/run/step-40" and store.place == "host"
        assert open_store(store.url).url == store.url
        ```
    """

    def __init__(self, path: str | os.PathLike[str], *, also: Sequence[Store] = ()) -> None:
        self._named = os.path.abspath(os.fspath(path))
        self.also = tuple(also)
        """Stores that all hosts share, with copies of objects."""
        self._elsewhere: dict[str, int] = {}
        super().__init__(host_folder(self._named))

    @property
    def url(self) -> str:
        """The URI of the folder, without the other folders."""
        return host_uri(self._named)

    @property
    def place(self) -> Place:
        """`host`."""
        return "host"

    @property
    def named_path(self) -> str:
        """The path, the same on all hosts."""
        return self._named

    def child(self, name: str) -> HostStore:
        """Return a store for the subfolder of that name."""
        self._inside(name)
        return HostStore(os.path.join(self._named, name), also=[store.child(name) for store in self.also])

    def parent(self) -> HostStore:
        """Return the store of the folder above, without other folders."""
        return HostStore(os.path.dirname(self._named))

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

    def open(self, name: str) -> Source:
        """Open the object on this host, or where a copy is if this host has none."""
        return self._store_with(name).open(name) if self.also else super().open(name)

    def size(self, name: str) -> int:
        """Return the size of the object on this host, or of the copy elsewhere."""
        return self._store_with(name).size(name) if self.also else super().size(name)

    def _store_with(self, name: str) -> Store:
        if name in self._elsewhere:
            return self.also[self._elsewhere[name]]
        own = LocalStore(self._path)
        if own.exists(name):
            return own
        return next((store for store in self.also if store.exists(name)), own)
