"""Coordination of ranks with deadlines: a phase succeeds on all ranks, or fails on all and names the failing ranks.

An operation, such as a save, is a sequence of phases. `make_coordinator` is the entry point: it returns the coordinator
of one operation of a process group. Each call of a coordinator's method is one phase, which all ranks run together. The
other names are for libraries that run operations in threads and processes of their own.
"""

from dcp_ranks.choose_coordinator import make_coordinator
from dcp_ranks.errors import (
    ERROR_TYPES,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    ErrorTypes,
    JobSecretError,
    OperationError,
    PeerLostError,
    PhaseFailedError,
    RankDisagreementError,
    RanksError,
    StreamError,
)
from dcp_ranks.interrupts import interrupts_deferred
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.peers.options import PeerOptions
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS, Coordinator, LocalCoordinator
from dcp_ranks.phases.fence import check_fence
from dcp_ranks.phases.outcomes import Failure, failure_of
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import borrow_store, shared_peers, start_prefix, store_of
from dcp_ranks.streams.cards import StreamCard
from dcp_ranks.streams.dispatcher import Dispatcher
from dcp_ranks.streams.hosts import group_by_host
from dcp_ranks.streams.job_secret import job_secret
from dcp_ranks.streams.reception import NOT_NOW, NotNow, StreamHandler
from dcp_ranks.streams.stream import Stream
from dcp_ranks.streams.streams import Streams
from dcp_ranks.transport.chunked_store import KeyValueStore, StoreWire, guard_store
from dcp_ranks.transport.pickled import decode, encode
from dcp_ranks.transport.store_address import STORE_TIMEOUT, connect_store, innermost_store, prefixed_store
from dcp_ranks.transport.timed_store import TimedStore
from dcp_ranks.world_size import assume_job_size, job_size

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "ERROR_TYPES",
    "NOT_NOW",
    "STORE_TIMEOUT",
    "CollectiveCoordinator",
    "Coordinator",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "Dispatcher",
    "ErrorTypes",
    "Failure",
    "JobSecretError",
    "KeyValueStore",
    "LocalCoordinator",
    "NotNow",
    "OperationError",
    "PeerLostError",
    "PeerOptions",
    "Peers",
    "PhaseFailedError",
    "RankDisagreementError",
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
    "prefixed_store",
    "shared_peers",
    "start_prefix",
    "store_of",
]
