"""Names of what can be chosen about a checkpoint's data files, and the checks of those choices."""

from __future__ import annotations

import os
from enum import Enum
from typing import Literal, get_args

__all__ = ["Layout", "SerializationFormat", "Verify", "check_choice", "default_thread_count"]

Layout = Literal["torch", "raw"]
"""`torch`: every tensor item is an archive that `torch.load` opens, so that stock can read the checkpoint.
`raw`: aligned bytes only, small items packed side by side; smaller and faster, not readable by stock."""

Verify = Literal["blocks", "full", "before"] | bool
"""`blocks` (or True): check the CRC blocks that a read touches. `full`: check whole items, also where stock left only
one CRC for all of it. `before`: check every range before the first value changes. False: check nothing."""

_MAX_DEFAULT_THREADS = 8


class SerializationFormat(Enum):
    """Stock's choice of item format. Source: torch 2.13 `torch.distributed.checkpoint.filesystem`."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_choice(name: str, value: object, allowed: object) -> None:
    """Raise ValueError if `value` is not one of the literals of `allowed`, naming them."""
    choices = get_args(allowed)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known; choose one of {', '.join(map(repr, choices))}")


def default_thread_count() -> int:
    """Threads to use when the caller names no number: the cores that this process may run on, at most 8."""
    return max(1, min(_MAX_DEFAULT_THREADS, len(os.sched_getaffinity(0))))
