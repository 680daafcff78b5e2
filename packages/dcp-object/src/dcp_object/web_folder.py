"""`WebFolder`: read-only store of a checkpoint on a web server, by HEAD and ranged GET requests."""

from __future__ import annotations

from typing import NoReturn

from dcp_io import Entry, Sink, StorageError
from dcp_manifest import METADATA_NAME, CheckpointNotFoundError
from dcp_object.store import ObjectStore

__all__ = ["WebFolder"]


class WebFolder(ObjectStore):
    """Read-only store of the files below a URL. HTTP cannot list a folder: a checkpoint is found by its `.metadata`."""

    def list(self) -> list[Entry]:
        """List only the index, if it exists: HTTP has no listing, and the index names the other files."""
        try:
            meta = self.about(METADATA_NAME)
        except CheckpointNotFoundError:
            return []
        return [Entry(METADATA_NAME, int(meta["size"]), meta["last_modified"].timestamp())]

    def folders(self) -> tuple[str, ...]:
        """Raise StorageError: a web server cannot be listed."""
        raise StorageError(f"{self.url}: a web server does not say what it has; name a checkpoint itself")

    def create(self, name: str) -> Sink:
        """Raise StorageError: a web server is read-only."""
        self._refuse(name)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Raise StorageError: a web server is read-only."""
        del data, tag, sync
        self._refuse(name)

    def touch(self, name: str) -> None:
        """Raise StorageError: a web server is read-only."""
        self._refuse(name)

    def delete(self, name: str) -> None:
        """Raise StorageError: a web server is read-only."""
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(f"{self.url}/{name}: checkpoints on web servers can be read, not written; save elsewhere")
