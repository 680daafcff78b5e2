"""Buffers are found in the memory files that this process has mapped."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from dcp_io.lent_memory import FileId, _mappings

PAGE = mmap.PAGESIZE


def mapped(pages: int = 2) -> tuple[mmap.mmap, FileId]:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, pages * PAGE)
    memory = mmap.mmap(descriptor, pages * PAGE)
    FileId.note(memory, descriptor)
    status = os.fstat(descriptor)
    os.close(descriptor)
    return memory, FileId(status.st_dev, status.st_ino)


@pytest.fixture
def files() -> Iterator[list[tuple[mmap.mmap, FileId]]]:
    yield [mapped() for _ in range(20)]
    gc.collect()


def test_each_buffer_is_found_in_its_file(files: list[tuple[mmap.mmap, FileId]]) -> None:
    for memory, file in files:
        view = memoryview(memory)
        for start, stop in [(0, 1), (0, 2 * PAGE), (5, PAGE + 7), (2 * PAGE - 1, 2 * PAGE)]:
            assert FileId.find(view[start:stop]) == (file, start)
            assert FileId.find(view[start:stop].toreadonly()) == (file, start)
        assert FileId.find(np.frombuffer(memory, np.uint8)[PAGE:].data) == (file, PAGE)


def test_other_memory_is_not_found(files: list[tuple[mmap.mmap, FileId]]) -> None:
    assert FileId.find(b"elsewhere") is None
    assert FileId.find(bytearray(PAGE)) is None
    assert FileId.find(memoryview(files[0][0])[:0]) is None


def test_a_buffer_that_leaves_its_mapping_is_not_found() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 2 * PAGE)
    whole = mmap.mmap(descriptor, 2 * PAGE)
    FileId.note(whole, descriptor)
    around = np.frombuffer(whole, np.uint8)
    inner = np.lib.stride_tricks.as_strided(around, (2 * PAGE + 1,), (1,), writeable=False)
    assert FileId.find(inner.data) is None
    os.close(descriptor)


def test_freed_mappings_are_forgotten() -> None:
    memory, _ = mapped()
    del memory
    gc.collect()
    kept, file = mapped()  # perhaps at the same address
    assert FileId.find(memoryview(kept)) == (file, 0)
    assert all(one.memory() is not None for one in _mappings)
