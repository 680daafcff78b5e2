"""Damaging files of a checkpoint, one byte or one file at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from dcp_io import LocalStore
from dcp_manifest.file.blob import FOOTER_BYTES
from dcp_manifest.file.manifest_read import read_index
from integration_tests.kits.damage import data_files

__all__ = ["METADATA", "data_files", "files", "flipped", "head_bytes", "payload_bytes", "swap"]

METADATA = ".metadata"


def files(folder: Path) -> list[Path]:
    """All files of a checkpoint, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.is_file())


@contextlib.contextmanager
def flipped(path: Path, position: int, mask: int) -> Iterator[None]:
    """The file with the bits of `mask` flipped in the byte at `position`; as before afterwards."""
    fd = os.open(path, os.O_RDWR)
    try:
        before = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([before[0] ^ mask]), position)
        try:
            yield
        finally:
            os.pwrite(fd, before, position)
    finally:
        os.close(fd)


def swap(one: Path, other: Path) -> None:
    """Exchange the contents of two files."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def head_bytes(folder: Path) -> int:
    """Length of the pickle at the beginning of `.metadata`, which is for stock."""
    data = (folder / METADATA).read_bytes()
    footer = data[-FOOTER_BYTES:]
    return int.from_bytes(footer[16:24], "little")


def payload_bytes(folder: Path) -> dict[tuple[str, int], tuple[str, int]]:
    """(file, position) of each byte that a value is made of → the value's key, and where its stored range begins."""
    index = read_index(LocalStore(folder).read(METADATA), file=METADATA)
    found: dict[tuple[str, int], tuple[str, int]] = {}
    tensors = [name for name, count in zip(index.tensor_names, index.tensor_chunks, strict=True) for _ in range(count)]
    for names, items in ((tensors, index.chunk_items), (index.object_names, index.object_items)):
        for row, name in enumerate(names):
            item = index.stored_item(items, row)
            start = item.offset + item.lead
            found.update({(item.file, start + n): (name, start) for n in range(item.stored_bytes)})
    return found
