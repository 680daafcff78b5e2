"""The storage refuses: a full disk, failures in a writer thread of one rank. (An error at each call in turn:
`test_crash_points`.)

A save that fails raises on every rank, publishes nothing, leaves the old checkpoint as it was and nothing else; a save
that succeeds has published, whatever went wrong with its cleanup.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_core.errors import CheckpointException
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness.small_disk import mounted

MIB = 1 << 20


def big_state(seed: int) -> dict[str, torch.Tensor]:
    """More than one writer thread has to do."""
    maker = torch.Generator().manual_seed(seed)
    return {f"t{n}": torch.randn(3 * MIB // 4, generator=maker) for n in range(4)}


def loads(folder: Path | str, seed: int) -> bool:
    template = {key: torch.zeros_like(value) for key, value in big_state(0).items()}
    dcp.load(template, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return same_bits(template, big_state(seed))


def save_big(folder: Path | str, seed: int, **options: Any) -> None:
    writer = dcp.FileSystemWriter(folder, thread_count=2, **options)
    dcp.save(big_state(seed), storage_writer=writer)


def failing(name: str, number: int, error: int) -> Any:
    """`os.<name>` fails in the second writer thread of this process, from its n-th call on."""
    real = getattr(os, name)
    # Keyed by the threads themselves: a number is given again as soon as its thread has ended.
    seen: dict[threading.Thread, int] = {}

    def call(*args: Any) -> Any:
        thread = threading.current_thread()
        seen[thread] = seen.get(thread, 0) + 1
        writers = [one for one in seen if one is not threading.main_thread()]
        if writers[1:2] == [thread] and seen[thread] >= number:
            raise OSError(error, os.strerror(error))
        return real(*args)

    return mock.patch.object(os, name, call)


def save_with_failing_thread(folder: str, rank: int, name: str, number: int, error: int) -> str:
    """What the rank was told; the thread of one rank fails."""
    at_fault = dist.is_initialized() and dist.get_rank() == rank
    with failing(name, number if at_fault else 1 << 30, error):
        try:
            save_big(folder, 2)
        except CheckpointException as raised:
            return str(raised)
    return "saved"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("name", "number", "error"), [("pwritev", 1, errno.ENOSPC), ("pwritev", 2, errno.EIO), ("fsync", 1, errno.EIO)]
)
def test_an_error_in_a_writer_thread(ranks: Any, tmp_path: Path, rank: int, name: str, number: int, error: int) -> None:
    folder = tmp_path / "checkpoint"
    ranks.run(2, save_big, str(folder), 1)
    before = sorted(path.name for path in folder.iterdir())
    assert len(before) == 5
    for text in ranks.run(2, save_with_failing_thread, str(folder), rank, name, number, error):
        assert os.strerror(error) in text
        assert f"failed on rank {rank}" in text
        assert str(folder) in text
    assert loads(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == before
    ranks.run(2, save_big, str(folder), 3)
    assert loads(folder, 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MiB."""
    with mounted(tmp_path / "disk", "20m") as place:
        yield place


def save_and_report(folder: str, seed: int) -> str:
    try:
        save_big(folder, seed)
    except CheckpointException as raised:
        return str(raised)
    return "saved"


def test_a_full_disk(ranks: Any, small_disk: Path) -> None:
    """The disk holds one checkpoint, not two."""
    folder = small_disk / "checkpoint"
    ranks.run(2, save_big, str(folder), 1)
    before = sorted(path.name for path in folder.iterdir())
    free = os.statvfs(folder).f_bavail
    for text in ranks.run(2, save_and_report, str(folder), 2):
        assert os.strerror(errno.ENOSPC) in text
    assert loads(folder, 1)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert os.statvfs(folder).f_bavail == free
    for path in folder.iterdir():
        path.unlink()
    assert ranks.run(2, save_and_report, str(folder), 2) == ["saved", "saved"]
    assert loads(folder, 2)
