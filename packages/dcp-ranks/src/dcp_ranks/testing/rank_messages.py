"""Messages between a `RankPool` and its rank processes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Call", "Done", "Gone", "Join", "Raised"]


@dataclass(frozen=True, slots=True)
class Join:
    """Join a new default process group after leaving the old one; with `backend` None, only leave.

    `port` is None for the rank that hosts the store; it replies twice: with the port, and after joining.
    """

    rank: int
    world_size: int
    backend: str | None
    port: int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Call a pickled pair (function, arguments), with pickled warning filters.

    `modules` maps modules that the rank cannot import by name to their files.
    """

    function: bytes
    filters: bytes
    sys_path: tuple[str, ...]
    modules: dict[str, str]


@dataclass(frozen=True, slots=True)
class Done:
    """Reply with the pickled return value."""

    result: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Reply of a failed request: traceback, and pickled exception or None."""

    text: str
    exception: bytes | None


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank process ended without replying."""

    text: str
