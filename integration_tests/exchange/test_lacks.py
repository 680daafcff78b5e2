"""A rank that lacks memory, descriptors or sockets: all read for themselves, or raise the same error with a remedy."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_exchange import arena
from dcp_ranks.streams import streams as streams_module
from dcp_ranks.testing.ranks import RankPool

SIZE = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> str:
    dcp.save({"w": torch.arange(float(SIZE))}, checkpoint_id=tmp_path, no_dist=True)
    return str(tmp_path)


def refuse(*_: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def refuse_large(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size) if 0 < size <= mmap.PAGESIZE else refuse()


def refuse_of_others(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size) if size else refuse()


def load_with(folder: str, where: str, name: str, call: Callable[..., Any]) -> tuple[str, bool]:
    """Return the reason or the error of a load in which a call of rank 1 fails, and whether the next load is right."""
    place = {"os": os, "mmap": arena, "streams": streams_module}[where]
    instead = mock.Mock(mmap=call) if place is arena else call
    template = {"w": torch.zeros(SIZE)}
    with mock.patch.object(place, name, instead if dist.get_rank() == 1 else getattr(place, name)):
        try:
            said = dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=60).cooperative_reason
            assert template["w"][-1] == SIZE - 1
        except dcp.DcpError as error:
            said = f"{type(error).__name__}: {error}"
    return said, dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=60).cooperative


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [("os", "memfd_create", refuse), ("mmap", "mmap", refuse), ("streams", "open_doors", refuse)],
)
def test_what_is_lacking_at_the_beginning(
    ranks: RankPool, folder: str, where: str, name: str, call: Callable[..., Any]
) -> None:
    for reason, right in ranks.run(3, load_with, folder, where, name, call):
        assert reason.startswith("rank 1: ")
        assert os.strerror(errno.ENOMEM) in reason
        assert right


@pytest.mark.parametrize("call", [refuse_large, refuse_of_others])
def test_what_is_lacking_later(ranks: RankPool, folder: str, call: Callable[..., Any]) -> None:
    for text, right in ranks.run(3, load_with, folder, "mmap", "mmap", call):
        assert text.startswith("CheckpointException: ")
        assert "failed on rank" in text
        assert "no shared memory of " in text
        assert "or load with cooperative=False" in text
        assert right
