"""`WebFolder`: a checkpoint on a web server, to be read. What it takes of HTTP is HEAD and GET of ranges."""

from __future__ import annotations

from typing import NoReturn

from dcp_io import Entry, Sink, StorageError
from dcp_manifest import METADATA_NAME, CheckpointNotFoundError
from dcp_object.store import ObjectStore

__all__ = ["WebFolder"]


class WebFolder(ObjectStore):
    """Files below a URL. Nothing can be written, and nothing listed: a checkpoint is found by its index's name."""

    def list(self) -> list[Entry]:
        """The index, if there is one: HTTP cannot tell more, and the index names the rest."""
        try:
            meta = self.about(METADATA_NAME)
        except CheckpointNotFoundError:
            return []
        return [Entry(METADATA_NAME, int(meta["size"]), meta["last_modified"].timestamp())]

    def folders(self) -> tuple[str, ...]:
        """Refuse."""
        raise StorageError(f"{self.url}: a web server does not say what it has; name a checkpoint itself")

    def create(self, name: str) -> Sink:
        """Refuse."""
        self._refuse(name)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Refuse."""
        del data, tag, sync
        self._refuse(name)

    def touch(self, name: str) -> None:
        """Refuse."""
        self._refuse(name)

    def delete(self, name: str) -> None:
        """Refuse."""
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(f"{self.url}/{name}: checkpoints on web servers can be read, not written; save elsewhere")
