"""Options of a keeper, from the command line or the environment."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_memory.keeper.pool import available_bytes
from dcp_memory.places import check_run

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_IDLE_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class KeeperOptions:
    """See `dcp_memory.start_keeper`. The keeper ends with the process `parent`, if given."""

    run: str
    max_bytes: int
    generations: int = 2
    idle_timeout_seconds: float = _IDLE_TIMEOUT_SECONDS
    parent: int | None = None


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[KeeperOptions, bool]:
    """Return the options, and whether the keeper is to detach itself."""
    parser = argparse.ArgumentParser("python -m dcp_memory.keeper", description="Hold checkpoints of a run in memory.")
    parser.add_argument("run", type=_run, help="name of the run; its checkpoints are at keeper://RUN")
    parser.add_argument(
        "--max-bytes",
        type=_bytes,
        default=os.environ.get("DCP_KEEPER_MAX_BYTES") or None,
        help="limit of its memory, such as 64G; default: DCP_KEEPER_MAX_BYTES, or half of what is available",
    )
    parser.add_argument(
        "--generations",
        type=_count,
        default=os.environ.get("DCP_KEEPER_GENERATIONS") or "2",
        help="checkpoints that the run keeps in it; default: DCP_KEEPER_GENERATIONS, or 2",
    )
    parser.add_argument(
        "--idle-timeout-seconds",
        type=_seconds,
        default=os.environ.get("DCP_KEEPER_IDLE_TIMEOUT_SECONDS") or str(_IDLE_TIMEOUT_SECONDS),
        help="end after so long without a process that saves; default: DCP_KEEPER_IDLE_TIMEOUT_SECONDS, or 1800",
    )
    parser.add_argument(
        "--with-parent",
        type=_process,
        nargs="?",
        const=os.getppid(),
        metavar="PID",
        help="end with the process that started it, or with the process PID",
    )
    parser.add_argument("--detach", action="store_true", help="return once it answers, and go on in the background")
    found = parser.parse_args(arguments)
    max_bytes = available_bytes() // 2 if found.max_bytes is None else found.max_bytes
    options = KeeperOptions(found.run, max_bytes, found.generations, found.idle_timeout_seconds, found.with_parent)
    return options, found.detach


def _run(text: str) -> str:
    try:
        return check_run(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _bytes(text: str) -> int:
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    digits = number.rstrip("KMGT")
    try:
        size = int(float(digits) * _UNITS[number[len(digits) :]])
    except (ValueError, KeyError, OverflowError):
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes: write 64G, 512M or 1000000")
    return size


def _process(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a process")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of checkpoints of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
