"""Options of the writer beside `dcp_io`'s: stock's names of item formats, and the default number of threads."""

from __future__ import annotations

import os
from enum import Enum

__all__ = ["SerializationFormat", "check_format", "default_thread_count"]

_MAX_DEFAULT_THREADS = 8


class SerializationFormat(Enum):
    """Stock's choice of item format. Source: torch 2.13 `torch.distributed.checkpoint.filesystem`."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_format(serialization_format: Enum) -> None:
    """Refuse item formats but `TORCH_SAVE`; compares by value, since stock's enum means the same. Raises ValueError."""
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise ValueError(
            f"serialization_format={serialization_format} is not supported: files so written cannot be loaded "
            "again; use layout='raw' for plain bytes"
        )


def default_thread_count() -> int:
    """Return the default number of threads: the cores that this process may run on, at most 8."""
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))
