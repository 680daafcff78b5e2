"""Options of savers, as records: the overlap policy, deadlines, and the worker's share of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from dcp_core import PeerOptions
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS

__all__ = ["AsyncCheckpointerType", "Overlap", "SaverOptions", "WorkerOptions", "check_overlap"]

Overlap = Literal["wait", "skip", "latest"]
"""Policy for a save that starts while another one runs: `wait` for it, `skip` the new one, or let the new one replace
the save that is queued (`latest`)."""


class AsyncCheckpointerType(Enum):
    """Where a save runs: in a thread of this process, or in a worker process."""

    THREAD = "thread"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of the worker process: its share of the machine, and the timeout after which it counts as dead.

    Attributes:
        nice: Increment of the niceness, so that the trainer has priority on a shared core.
        batch: Whether the kernel schedules the worker as a batch job (`SCHED_BATCH`), which does not preempt running
            threads when it wakes up.
        ionice: I/O scheduling class and level (`("best-effort", 7)`, `("idle", 0)`); None leaves it unchanged.
        torch_threads: Number of threads for one operation of torch.
        cpu_affinity: The cores that the worker may run on; None leaves them unchanged.
        process_group: Whether the worker joins a gloo group of all savers over the trainer's store, for storage writers
            that use collectives.
        start_seconds: Timeout of the worker's start.
        silence_seconds: Time without a heartbeat after which the worker is killed.

    Example:
        ```python
        from dcp_async import AsyncSaver, SaverOptions, WorkerOptions

        worker = WorkerOptions(nice=19, torch_threads=2)
        saver = AsyncSaver("process", options=SaverOptions(worker=worker))  # the process starts with the first save
        saver.close()
        ```
    """

    nice: int = 10
    batch: bool = True
    ionice: tuple[Literal["best-effort", "idle"], int] | None = None
    torch_threads: int = 1
    cpu_affinity: tuple[int, ...] | None = None
    process_group: bool = False
    start_seconds: float = 120.0
    silence_seconds: float = 60.0


def _copy_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class SaverOptions:
    """Options of a saver: staging memory, timeouts, and the worker process.

    Attributes:
        max_staging_bytes: Limit of the memory for all staged copies of this rank; None for no limit.
        copy_threads: Number of threads that copy tensors in host memory while `save` waits.
        pin_memory: Whether staging memory is pinned, if CUDA is available.
        mutation_guard: Whether samples of each copy are compared with the source after copying: see `mutation_guard`.
        save_seconds: Deadline of one save in a worker process, which is killed after it; a save in a thread has no
            deadline. Also the limit of waiting for an earlier save, and for a copy.
        close_seconds: Limit of the time that `close` waits for running saves.
        timeout_seconds: Timeout of a rank that waits for the others in one phase; see `dcp_core.save`.
        peers: Options of the connections by which savers of different ranks watch each other; see `dcp_core.save`.
        worker: Options of the worker process.

    Example:
        ```python
        from dcp_async import AsyncSaver, SaverOptions

        options = SaverOptions(max_staging_bytes=8 << 30, save_seconds=600)
        with AsyncSaver("thread", options=options) as saver:
            saver.save({"step": 1}, checkpoint_id="step-1")
        ```
    """

    max_staging_bytes: int | None = None
    copy_threads: int = field(default_factory=_copy_threads)
    pin_memory: bool = True
    mutation_guard: bool = True
    save_seconds: float = 3600.0
    close_seconds: float = 600.0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    peers: PeerOptions = field(default_factory=PeerOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)

    def __post_init__(self) -> None:
        if self.copy_threads < 1:
            raise ValueError(f"copy_threads={self.copy_threads} must be at least 1")
        if self.max_staging_bytes is not None and self.max_staging_bytes < 1:
            raise ValueError(f"max_staging_bytes={self.max_staging_bytes} must be at least 1, or None for no limit")


def check_overlap(overlap: str) -> None:
    """Raise ValueError for an unknown overlap policy."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap={overlap!r} is not known; choose one of {', '.join(map(repr, get_args(Overlap)))}")
