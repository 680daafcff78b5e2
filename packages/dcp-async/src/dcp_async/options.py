"""Options of asynchronous savers."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, get_args

from dcp_core import PeerOptions
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

Overlap = Literal["wait", "skip", "latest"]
"""Policy for a new save while an earlier one runs: `wait` for it, `skip` the new save, or replace the queued save
(`latest`).
"""

Staging = Literal["refuse", "waves"]
"""Policy for a state dict larger than `max_staging_bytes`: `refuse` the save, or copy in `waves`, during which training
waits until the storage has taken the bytes that do not fit.
"""


class AsyncCheckpointerType(Enum):
    """Kind of an asynchronous saver: saves run in a thread of this process, or in a worker process."""

    THREAD = "thread"
    PROCESS = "process"


def saver_name(kind: Enum | str) -> str:
    """Return a kind's value, also of stock's enum."""
    return str(kind.value) if isinstance(kind, Enum) else kind


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of the worker process of a saver: scheduling priority, cores and timeouts.

    Attributes:
        nice: Increment of the worker's niceness; a positive number gives the trainer priority on a shared core.
        batch: Whether to schedule the worker as a batch job (`SCHED_BATCH`), which does not preempt running threads.
        ionice: I/O scheduling class and level, such as `("best-effort", 7)` or `("idle", 0)`; None keeps the trainer's.
        torch_threads: Number of threads of one torch operation.
        cpu_affinity: Numbers of the cores on which the worker may run; None for the cores of the trainer.
        process_group: Whether the workers of all ranks form a gloo group, for storage writers that use collectives.
        start_timeout_seconds: Time in seconds within which the worker must start.
        heartbeat_timeout_seconds: Time in seconds without a heartbeat after which the worker is killed.

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
    start_timeout_seconds: float = 120.0
    heartbeat_timeout_seconds: float = 60.0


def _copy_threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class SaverOptions:
    """Options of an asynchronous saver: staging memory, timeouts, and the worker process.

    Attributes:
        max_staging_bytes: Limit in bytes of the memory for all staged copies of this rank; None for no limit.
        staging: Policy for a save that needs more memory: `refuse` raises `NotEnoughMemoryError`; with `waves`, `save`
            returns when only `max_staging_bytes` are left to be written.
        copy_threads: Number of threads that copy tensors in host memory; by default one for each usable core, at most
            four.
        pin_memory: Whether the memory for staged copies is pinned, if the accelerator has pinned memory.
        mutation_guard: Whether to detect tensors that change during the copy, by comparing samples of their bytes.
        save_timeout_seconds: Time after which the worker of a running save is killed; a thread's save is not limited.
            Also limits how long `save` waits for an earlier save, and a save for the copy of its state dict.
        close_timeout_seconds: Longest time in seconds that `close` waits for running saves.
        timeout_seconds: Time in seconds that a rank waits in one phase for half of the others, and then for the rest.
        peers: Options for how the savers of different ranks watch each other and connect to each other.
        worker: Options of the worker process; a thread saver ignores them.

    Example:
        ```python
        from dcp_async import AsyncSaver, SaverOptions

        options = SaverOptions(max_staging_bytes=8 << 30, save_timeout_seconds=600)
        with AsyncSaver("thread", options=options) as saver:
            saver.save({"step": 1}, checkpoint_id="step-1")
        ```
    """

    max_staging_bytes: int | None = None
    copy_threads: int = field(default_factory=_copy_threads)
    pin_memory: bool = True
    mutation_guard: bool = True
    save_timeout_seconds: float = 3600.0
    close_timeout_seconds: float = 600.0
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    peers: PeerOptions = field(default_factory=PeerOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    staging: Staging = "refuse"

    def __post_init__(self) -> None:
        if self.copy_threads < 1:
            raise ValueError(f"copy_threads={self.copy_threads} must be at least 1")
        if self.max_staging_bytes is not None and self.max_staging_bytes < 1:
            raise ValueError(f"max_staging_bytes={self.max_staging_bytes} must be at least 1, or None for no limit")
        if self.staging not in get_args(Staging):
            raise ValueError(f"staging={self.staging!r} is not known; choose 'refuse' or 'waves'")
        if self.staging == "waves" and self.max_staging_bytes is None:
            raise ValueError("staging='waves' needs max_staging_bytes, the memory that copies may take")


def check_overlap(overlap: str) -> None:
    """Raise ValueError unless `overlap` is an overlap policy."""
    if overlap not in get_args(Overlap):
        raise ValueError(f"overlap={overlap!r} is not known; choose one of {', '.join(map(repr, get_args(Overlap)))}")
