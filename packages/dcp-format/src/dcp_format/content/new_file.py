"""Atomic creation of a file, which appears under its name only when it is complete and durable.

Temporary files of killed processes are removed at the next write of the same file; see `temporary_files`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dcp_format.content.temporary_files import sweep, temporary_name
from dcp_io import CheckpointExistsError, LocalStore, Sink
from dcp_manifest import file_path

__all__ = ["WriteBack", "aborting", "give_name", "new_file", "refuse_existing"]

# As often as the engine of checkpoints does it: the disk works while the rest is read and written.
_SYNC_STEP_BYTES = 32 << 20
# What file systems without hard links answer.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EMLINK)
Buffer = bytes | bytearray | memoryview


class WriteBack(Sink):
    """A `Sink` that starts write-back to the disk early, which shortens the final fsync.

    Args:
        sink: The sink that writes the bytes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._started = 0

    @property
    def name(self) -> str:
        """Name of the object that the sink writes."""
        return self._sink.name

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return self._sink.tell()

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of the buffers, in order."""
        self._sink.write(buffers)
        if self._sink.tell() - self._started >= _SYNC_STEP_BYTES:
            self._sink.start_sync()
            self._started = self._sink.tell()

    def close(self, *, sync: bool) -> None:
        """Complete the object; with `sync`, durably."""
        self._sink.close(sync=sync)

    def abort(self) -> None:
        """Abort the write: remove the object."""
        self._sink.abort()


@contextlib.contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Sink]:
    """Context manager that creates a file atomically: the file written to its `Sink` appears at `path` after the block.

    After an error in the `with` block, `path` is unchanged.

    Raises:
        CheckpointExistsError: `path` exists at the beginning or at the end of the `with` block, and `overwrite` is
            False.
        InvalidPlaceError: `path` is a URI, or names no file.
    """
    place = Path(file_path(path)).absolute()
    refuse_existing(place, overwrite=overwrite)
    store = LocalStore(place.parent)
    store.make()
    sweep(store, {place.name}.__contains__)
    temporary = temporary_name(place.name)
    sink = WriteBack(store.create(temporary))
    with aborting(sink):
        yield sink
        sink.close(sync=True)
        give_name(place.parent / temporary, place, overwrite=overwrite)
    store.sync_folder()


def give_name(temporary: Path, place: Path, *, overwrite: bool) -> None:
    """Move a finished file to `place` atomically.

    Raises:
        CheckpointExistsError: Another process has meanwhile made a file at `place`, and `overwrite` is False.
    """
    if not overwrite:
        # Unlike a rename, a new link never replaces an existing file.
        try:
            os.link(temporary, place)
        except FileExistsError:
            refuse_existing(place, overwrite=False)
            raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            refuse_existing(place, overwrite=False)
        else:
            os.unlink(temporary)
            return
    os.replace(temporary, place)


@contextlib.contextmanager
def aborting(sink: Sink) -> Iterator[None]:
    """Abort the sink, which removes its file, if the `with` block raises an error."""
    try:
        yield
    except BaseException:
        sink.abort()
        raise


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise CheckpointExistsError if `path` exists and may not be replaced."""
    if not overwrite and os.path.lexists(path):
        raise CheckpointExistsError(f"{path} exists already; choose another place, or allow overwriting it")
