"""Coordinate ranks with deadlines: a phase succeeds on all ranks, or fails on all and names the failing ranks.

An operation, such as a save, is a sequence of phases that all ranks run together. `make_coordinator` returns the
coordinator of one operation. Each of its methods is one phase.
"""

from typing import TYPE_CHECKING

from dcp_base import import_lazily
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
    from dcp_ranks.streams.cards import StreamCard as StreamCard
    from dcp_ranks.streams.cards import group_by_host as group_by_host
    from dcp_ranks.streams.greetings import job_secret as job_secret
    from dcp_ranks.streams.reception import NOT_NOW as NOT_NOW
    from dcp_ranks.streams.reception import StreamHandler as StreamHandler
    from dcp_ranks.streams.stream import Stream as Stream
    from dcp_ranks.streams.streams import Streams as Streams

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

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_ranks.streams.cards": ("StreamCard", "group_by_host"),
        "dcp_ranks.streams.greetings": ("job_secret",),
        "dcp_ranks.streams.reception": ("NOT_NOW", "StreamHandler"),
        "dcp_ranks.streams.stream": ("Stream",),
        "dcp_ranks.streams.streams": ("Streams",),
    },
)
