"""Errors of the command: exit codes, and messages with the libraries' advice in options instead of Python."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from dcp_base.errors import DcpError, InvalidPlaceError, PluginNotFoundError

DIFFERENT = 1
WRONG_USE = 2
NOT_FOUND = 3
UNREADABLE = 4
UNSUPPORTED = 5
UNSAFE = 6
EXISTS = 7
INTERRUPTED = 130
KINDS: Mapping[int, str] = MappingProxyType(
    {
        WRONG_USE: "usage",
        NOT_FOUND: "not_found",
        UNREADABLE: "failed",
        UNSUPPORTED: "unsupported",
        UNSAFE: "unsafe",
        EXISTS: "exists",
        INTERRUPTED: "interrupted",
    }
)

OUR_PACKAGES = frozenset(
    f"dcp_{name}"
    for name in (
        *("all", "async", "base", "bridge", "core", "crash", "data", "exchange", "format", "fs", "fsspec", "inspect"),
        *("io", "lightning", "manager", "manifest", "memory", "object", "prove", "ranks", "state", "telemetry"),
        *("tiers", "torchtitan", "transformers", "transforms"),
    )
)
"""Their unforeseen errors are bugs."""
_WORST_FIRST = (UNREADABLE, UNSAFE, UNSUPPORTED, NOT_FOUND, EXISTS, WRONG_USE, DIFFERENT, 0)


def worst(codes: Iterable[int]) -> int:
    """Return the exit code that leaves most unknown."""
    return min(codes, key=_WORST_FIRST.index, default=0)


def foreseen(error: BaseException) -> tuple[int, str] | None:
    """Return exit code and message for a user's or a plug-in's error; None for a bug of these packages."""
    if isinstance(error, DcpError | OSError):
        code = next((code for kind, code in _codes() if isinstance(error, kind)), None)
        return None if code is None else (code, first_line(error))
    plugin = _plugin_in(error) if isinstance(error, Exception) else None
    return None if plugin is None else (UNREADABLE, f"plug-in {plugin}: {type(error).__name__}: {first_line(error)}")


def known(error: Exception) -> tuple[int, str]:
    """Return what `foreseen` says; raise the error itself if it is a bug."""
    found = foreseen(error)
    if found is None:
        raise error
    return found


def first_line(error: BaseException) -> str:
    """Return an error's message as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def _plugin_in(error: Exception) -> str | None:
    from dcp_base import installed  # noqa: PLC0415 - as above

    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = {name.partition(".")[0] for name in raised_in} - OUR_PACKAGES
    for plugin in installed.list():
        modules = {plugin.module or "", *installed.modules_of(plugin)}
        if packages & {module.partition(":")[0].partition(".")[0] for module in modules}:
            return (plugin.distribution or plugin.name).partition(" ")[0]
    return None


def _codes() -> Iterator[tuple[type[BaseException], int]]:
    """Return error classes and exit codes; the first match counts."""
    # Imported when something has gone wrong: `dcp plugins` and `dcp --help` need no numpy.
    from dcp_io import SaveInProgressError  # noqa: PLC0415
    from dcp_manifest import (  # noqa: PLC0415
        CheckpointNotFoundError,
        CorruptCheckpointError,
        UnsafeCheckpointError,
        UnsupportedFormatError,
    )

    yield PluginNotFoundError, UNSUPPORTED
    yield LookupError, NOT_FOUND
    yield InvalidPlaceError, WRONG_USE
    yield CheckpointNotFoundError, NOT_FOUND
    yield UnsafeCheckpointError, UNSAFE
    yield UnsupportedFormatError, UNSUPPORTED
    yield CorruptCheckpointError, UNREADABLE
    yield SaveInProgressError, UNREADABLE
    yield FileExistsError, EXISTS
    yield DcpError, UNREADABLE
    yield FileNotFoundError, NOT_FOUND
    yield OSError, UNREADABLE


OTHER_NAME = "dcp-inspect"
"""Second name of the command, since `dcp` is mpiFileUtils on many clusters."""

_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), advice)
    for pattern, advice in (
        (
            r"[.;] [Ii]f you trust it, (?:load with|pass) .*",
            "; its values are made by code of that class, which the command never runs: it reads plain data only",
        ),
        (
            r", and overwrite=False; choose another id, or allow overwriting",
            "; choose another place, or add --overwrite",
        ),
        (r"or allow overwriting it", "or add --overwrite"),
        (r"\(\w+=[^`()]*, `(--[^`]+)`\)", r"(\1)"),
        (r" in a shell, or dcp_format\.convert\(.*\) in Python; .*", ""),
        (r"^include=", "--include "),
        (r"^exclude leaves", "--exclude leaves"),
        (
            r"pass them as storage_options, or by the environment",
            "give them by the environment, as for the storage's own tools",
        ),
        (r", as in a pathlib\.Path: write (\S+) as a string,", r": write \1,"),
        (r" \(options given: none\)", ""),
        (
            r"other formats have no place for one value per rank; load them with .*",
            "other formats have no place for one value per rank; leave them out (--exclude)",
        ),
        (r"\bcompression=('[^']*')", r"--compression \1"),
        (r"\brename_regex: ", "--rename-regex "),
    )
)


def in_options(message: str) -> str:
    """Return a message with its advice in options of the command."""
    for pattern, advice in _PHRASES:
        message = pattern.sub(advice, message)
    return message.replace("`dcp ", f"`{program()} ")


def program() -> str:
    """Return `dcp-inspect` if `dcp` is another program, else `dcp`."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    return started if started == OTHER_NAME else "dcp"
