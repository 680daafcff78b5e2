"""`open_store`: opens a folder in an object store, or on a web server to read it. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from dcp_base.schemes import WEB_SCHEMES
from dcp_io import Entry, Sink, StorageError
from dcp_manifest import CheckpointNotFoundError
from dcp_manifest.folders.folder import METADATA_NAME
from dcp_object.address import parse_address
from dcp_object.client import connect
from dcp_object.options import Options
from dcp_object.sink import PART_BYTES, UPLOADS
from dcp_object.store import ObjectStore


def open_store(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    part_bytes: int = PART_BYTES,
    uploads: int = UPLOADS,
    spread: int = 0,
) -> ObjectStore:
    """Open the store of a folder; no request is sent. Raises ValueError for an invalid URI or option."""
    address = parse_address(uri)
    scheme = address.root.partition("://")[0]
    client = connect(address.root, Options.of(storage_options, plain_http=scheme == "http"))
    kind = _WebFolder if scheme in WEB_SCHEMES else ObjectStore
    return kind(client, address, part_bytes=part_bytes, uploads=uploads, spread=spread)


class _WebFolder(ObjectStore):
    """Read-only store of the files below a URL. HTTP cannot list a folder: a checkpoint is found by its `.metadata`."""

    def list(self) -> list[Entry]:
        """List only the index, if it exists; it names the other files."""
        try:
            meta = self.about(METADATA_NAME)
        except CheckpointNotFoundError:
            return []
        return [Entry(METADATA_NAME, int(meta["size"]), meta["last_modified"].timestamp())]

    def folders(self) -> tuple[str, ...]:
        raise StorageError(f"{self.url}: a web server does not say what it has; name a checkpoint itself")

    def create(self, name: str, *, sync: bool = True) -> Sink:
        del sync
        self._refuse(name)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        del data, tag, sync
        self._refuse(name)

    def touch(self, name: str) -> None:
        self._refuse(name)

    def delete(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise StorageError(f"{self.url}/{name}: checkpoints on web servers can be read, not written; save elsewhere")
