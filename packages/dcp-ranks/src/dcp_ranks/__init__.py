"""Coordinate ranks with deadlines: a phase succeeds on all ranks, or fails on all and names the failing ranks.

An operation, such as a save, is a sequence of phases that all ranks run together. `make_coordinator` returns the
coordinator of one operation. Each of its methods is one phase.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_ranks.choose_coordinator import make_coordinator
from dcp_ranks.errors import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    OperationError,
    PeerLostError,
    RanksError,
    StreamError,
)
from dcp_ranks.options import PeerOptions
from dcp_ranks.phases.coordinator import Coordinator
from dcp_ranks.store_connections import store_of

if TYPE_CHECKING:
    from dcp_ranks.streams.cards import StreamCard, group_by_host
    from dcp_ranks.streams.greetings import job_secret
    from dcp_ranks.streams.reception import NOT_NOW, StreamHandler
    from dcp_ranks.streams.stream import Stream
    from dcp_ranks.streams.streams import Streams

__all__ = [
    "NOT_NOW",
    "CheckpointException",
    "Coordinator",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "OperationError",
    "PeerLostError",
    "PeerOptions",
    "RanksError",
    "Stream",
    "StreamCard",
    "StreamError",
    "StreamHandler",
    "Streams",
    "group_by_host",
    "job_secret",
    "make_coordinator",
    "store_of",
]

_STREAMS = {
    "NOT_NOW": "reception",
    "Stream": "stream",
    "StreamCard": "cards",
    "StreamHandler": "reception",
    "Streams": "streams",
    "group_by_host": "cards",
    "job_secret": "greetings",
}
"""Public name → module that is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _STREAMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"dcp_ranks.streams.{_STREAMS[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_STREAMS})
