"""The raw floor: the same bytes by `pwritev` (and fsync) and `preadv`, with as many threads and files as we use.

No names, no checksums, no index, no atomic publish: what is left when all that a checkpoint is for is left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist

from integration_tests.benchmarks.workers.contract import Options
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]

_MAX_PIECES = 1024  # of one call
_MAX_THREADS = 8
_CALL_BYTES = 64 << 20
Batch = tuple[int, list[memoryview]]


def version() -> str:
    return f"{_threads()} threads"


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    folder.mkdir(exist_ok=True)

    def write(path: Path, batches: list[Batch]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for offset, pieces in batches:
                _whole(os.pwritev, descriptor, pieces, offset)
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _parallel(write, state, folder)
    if fsync:
        descriptor = os.open(folder, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def load(state: dict[str, Any], folder: Path, *, options: Options) -> None:
    def read(path: Path, batches: list[Batch]) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            for offset, pieces in batches:
                _whole(os.preadv, descriptor, pieces, offset)
        finally:
            os.close(descriptor)

    _parallel(read, state, folder)


def _parallel(call: Callable[[Path, list[Batch]], None], state: dict[str, Any], folder: Path) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    shares = _shares([as_bytes(tensor).data for tensor in state.values()])
    with ThreadPoolExecutor(len(shares)) as pool:
        calls = [pool.submit(call, folder / f"{rank}_{n}.bin", share) for n, share in enumerate(shares)]
        for each in calls:
            each.result()


def _threads() -> int:
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def _shares(buffers: Sequence[memoryview]) -> list[list[Batch]]:
    """Buffers in turn to each thread, in order within its file, batched into few calls."""
    total = sum(len(buffer) for buffer in buffers)
    shares: list[list[Batch]] = []
    position, batch_bytes, share_bytes = 0, _CALL_BYTES, total
    for buffer in buffers:
        if share_bytes >= -(-total // _threads()):
            shares.append([])
            position, share_bytes, batch_bytes = 0, 0, _CALL_BYTES
        if batch_bytes >= _CALL_BYTES or len(shares[-1][-1][1]) == _MAX_PIECES:
            shares[-1].append((position, []))
            batch_bytes = 0
        shares[-1][-1][1].append(buffer)
        position, share_bytes, batch_bytes = (n + len(buffer) for n in (position, share_bytes, batch_bytes))
    return shares


def _whole(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, pieces: list[memoryview], at: int
) -> None:
    """Repeat a call that may end short."""
    while pieces:
        done = call(descriptor, pieces, at)
        if done == 0:
            raise EOFError(f"the file ends at {at}")
        at += done
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = pieces[0][done:]
