"""Coordinate ranks with deadlines: a phase succeeds on all ranks, or fails on all and names the failing ranks.

An operation, such as a save, is a sequence of phases that all ranks run together. `make_coordinator` returns the
coordinator of one operation. Each of its methods is one phase.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcp_ranks.choose_coordinator import assume_job_size, job_size, make_coordinator
from dcp_ranks.errors import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    OperationError,
    PeerLostError,
    RanksError,
    StreamError,
)
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.peers.monitor import PeerOptions, Peers
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS, Coordinator, LocalCoordinator
from dcp_ranks.phases.phases import Failure, check_fence, failure_of
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store, make_peers, shared_peers, shared_store, start_prefix, store_of
from dcp_ranks.transport.store_wire import (
    STORE_TIMEOUT,
    KeyValueStore,
    StoreWire,
    TimedStore,
    connect_store,
    decode,
    encode,
    guard_store,
    innermost_store,
    prefixed_store,
)

if TYPE_CHECKING:
    from dcp_ranks.streams.cards import StreamCard, group_by_host
    from dcp_ranks.streams.dispatcher import Dispatcher
    from dcp_ranks.streams.greetings import job_secret
    from dcp_ranks.streams.reception import NOT_NOW, NotNow, StreamHandler
    from dcp_ranks.streams.stream import Stream
    from dcp_ranks.streams.streams import Streams

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "NOT_NOW",
    "STORE_TIMEOUT",
    "CheckpointException",
    "CollectiveCoordinator",
    "Coordinator",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "Dispatcher",
    "Failure",
    "KeyValueStore",
    "LocalCoordinator",
    "NotNow",
    "OperationError",
    "PeerLostError",
    "PeerOptions",
    "Peers",
    "RanksError",
    "StoreCoordinator",
    "StoreWire",
    "Stream",
    "StreamCard",
    "StreamError",
    "StreamHandler",
    "Streams",
    "TimedStore",
    "assume_job_size",
    "borrow_store",
    "check_fence",
    "connect_store",
    "decode",
    "encode",
    "failure_of",
    "group_by_host",
    "guard_store",
    "innermost_store",
    "interrupts_deferred",
    "job_secret",
    "job_size",
    "make_coordinator",
    "make_peers",
    "prefixed_store",
    "shared_peers",
    "shared_store",
    "start_prefix",
    "store_of",
]

_STREAMS = {
    "NOT_NOW": "reception",
    "Dispatcher": "dispatcher",
    "NotNow": "reception",
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
