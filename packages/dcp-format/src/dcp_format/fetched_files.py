"""Downloads of files at a URI, for formats with readers that need local files."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dcp_core.errors import CheckpointNotFoundError, UnsafeCheckpointError
from dcp_format.safetensors.complete_set import SUFFIX
from dcp_io import Store, open_store
from dcp_io.stores.open_store import file_at

_PIECE_BYTES = 8 << 20
_INDEX_SUFFIX = ".index.json"


class Fetched:
    """A downloaded copy of the files at a URI, in a temporary folder; `close` removes it."""

    def __init__(self, uri: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dcp-format-")
        try:
            self.path = self._fetch(uri)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the copy."""
        self._folder.cleanup()

    def _fetch(self, uri: str) -> Path:
        found = file_at(uri)
        if found is not None and not found[1].endswith(_INDEX_SUFFIX):
            return self._copy(*found)
        store = found[0] if found is not None else open_store(uri)
        names = [entry.name for entry in store.list() if entry.name.endswith((SUFFIX, _INDEX_SUFFIX))]
        if not any(name.endswith(SUFFIX) for name in names):
            raise CheckpointNotFoundError(
                f"there is nothing to read at {uri}: neither a file, nor a directory with a checkpoint's .metadata or "
                f"{SUFFIX} files; check the address"
            )
        for name in names:
            self._copy(store, name)
        place = Path(self._folder.name)
        return place if found is None else place / found[1]

    def _copy(self, store: Store, name: str) -> Path:
        if "/" in name or name in (".", ".."):
            raise UnsafeCheckpointError(f"{store.url} lists {name!r}, which is no name of a file")
        place = Path(self._folder.name, name)
        with contextlib.closing(store.open(name)) as source, place.open("xb") as file:
            size = source.size()
            if size:  # a full disk is noticed at once
                os.posix_fallocate(file.fileno(), 0, size)
            memory = memoryview(bytearray(min(_PIECE_BYTES, size)))
            for at in range(0, size, _PIECE_BYTES):
                piece = memory[: size - at]
                source.read_into(at, [piece])
                file.write(piece)
        return place
