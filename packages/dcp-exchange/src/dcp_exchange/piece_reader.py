"""`PieceReader`: reads pieces of files from storage, in any thread, with errors that name file and key."""

from __future__ import annotations

import contextlib
import threading

import numpy as np

from dcp_io import Delivery, Source, StoreBackend
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["PieceReader"]


class PieceReader:
    """Reads pieces of a checkpoint's files.

    Args:
        backend: Backend of the checkpoint.
        delivery: Demands of this rank, for the keys in errors.
    """

    def __init__(self, backend: StoreBackend, delivery: Delivery) -> None:
        self._backend = backend
        self._delivery = delivery
        self._own = threading.local()
        self._lock = threading.Lock()
        self._opened: list[Source] = []
        self.bytes_read = 0
        """Number of bytes read so far."""

    def read(self, file: str, start: int, buffer: memoryview) -> None:
        """Fill the buffer with bytes of a file from `start` on.

        Raises:
            CheckpointReplacedError: The file is missing, and a newer save has replaced the checkpoint.
            CheckpointNotFoundError: The file is missing.
            CorruptCheckpointError: The file is too short.
        """
        with self._backend.noticing_replacement():
            try:
                source = self._open(file)
                if source.brings_memory:
                    np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(source.fetch(start, len(buffer)), np.uint8)
                else:
                    source.read_into(start, [buffer])
            except CheckpointNotFoundError as error:
                raise CheckpointNotFoundError(f"{error}{self._key_in(file, start, len(buffer))}") from error
            except CorruptCheckpointError as error:
                if error.key is not None:
                    raise
                raise CorruptCheckpointError(f"{error}{self._key_in(file, start, len(buffer))}", file=file) from error
        with self._lock:
            self.bytes_read += len(buffer)

    def close(self) -> None:
        """Close all files."""
        for source in self._opened:
            with contextlib.suppress(Exception):
                source.close()
        self._opened.clear()

    def _open(self, file: str) -> Source:
        """Return the source of a file. Each thread has one open, as the pieces that it reads are of few files."""
        known: tuple[str, Source] | None = getattr(self._own, "source", None)
        if known is not None and known[0] == file:
            return known[1]
        if known is not None:
            with self._lock:
                self._opened.remove(known[1])
            known[1].close()
            self._own.source = None
        source = self._backend.store.open(file)
        with self._lock:
            self._opened.append(source)
        self._own.source = file, source
        return source

    def _key_in(self, file: str, start: int, size: int) -> str:
        key = self._delivery.key_at(file, start, start + size)
        return "" if key is None else f"; {key!r} is stored in it"
