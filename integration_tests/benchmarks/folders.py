"""Folders that checkpoints are written to: made fresh, settled, dropped from the page cache, measured, removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["DEFAULT_PLACES", "drop_cache", "file_sizes", "opened", "remove", "settle"]

DEFAULT_PLACES: Mapping[str, str] = {"disk": tempfile.gettempdir(), "tmpfs": "/dev/shm"}


@contextmanager
def opened(places: Mapping[str, str]) -> Iterator[dict[str, Path]]:
    """Place → an empty folder there, removed in the end."""
    with ExitStack() as stack:
        yield {
            place: Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dcp-bench-", dir=root)))
            for place, root in places.items()
        }


def settle() -> None:
    """Write back what anybody left dirty, so that the next one timed does not pay for it."""
    os.sync()


def drop_cache(folder: Path) -> None:
    """Take the files' pages out of the page cache; they must have been settled."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def file_sizes(folder: Path) -> dict[str, int]:
    """How many files, the bytes of all, and of the index where there is one file for it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "index_bytes": sum(path.stat().st_size for path in files if path.name == ".metadata"),
    }


def remove(folder: Path) -> None:
    """Remove a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
