"""World size of the job: from `torch.distributed`, or as set in a worker process that saves for a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

__all__ = ["assume_job_size", "job_size"]

_assumed: ContextVar[int | None] = ContextVar("_assumed", default=None)


def job_size() -> int:
    """Return the number of ranks of the whole job (its world size); 1 without process groups."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def assume_job_size(size: int) -> Iterator[None]:
    """Context manager: inside the block, in this thread, `job_size` returns `size`. For worker processes."""
    token = _assumed.set(size)
    try:
        yield
    finally:
        _assumed.reset(token)
