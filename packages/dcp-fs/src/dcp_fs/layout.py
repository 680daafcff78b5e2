"""What the writer takes beside `dcp_io`'s choices: stock's names of item formats, and how many threads by default."""

from __future__ import annotations

import os
from enum import Enum

__all__ = ["SerializationFormat", "default_thread_count"]

_MAX_DEFAULT_THREADS = 8


class SerializationFormat(Enum):
    """Stock's choice of item format. Source: torch 2.13 `torch.distributed.checkpoint.filesystem`."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def default_thread_count() -> int:
    """Threads to use when the caller names no number: the cores that this process may run on, at most 8."""
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))
