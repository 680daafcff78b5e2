"""Decisions that all ranks make together, each in a phase with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_core import PeerOptions
from dcp_ranks import Coordinator, make_coordinator
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """Ranks that manage checkpoints together; one phase may take `timeout_seconds`."""

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        no_dist: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        peers: PeerOptions | None = None,
    ) -> None:
        self.process_group = process_group
        self.no_dist = no_dist
        self.timeout_seconds = timeout_seconds
        self.peers = peers

    def coordinator(self) -> Coordinator:
        """Return a `Coordinator` for one decision; every rank calls in the same order."""
        return make_coordinator(
            self.process_group,
            no_dist=self.no_dist,
            timeout_seconds=self.timeout_seconds,
            peers=self.peers,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `dcp_core.save` and `load` for these ranks."""
        return {"process_group": self.process_group, "no_dist": self.no_dist, "peers": self.peers}

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank decides and maintains the storage."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return 0 if self.alone else dist.get_rank(self.process_group)

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one."""
        if self.no_dist or not (dist.is_available() and dist.is_initialized()):
            return True
        return dist.get_world_size(self.process_group) == 1

    def decide(self, what: str, function: Callable[[], T]) -> T:
        """Call `function` on the coordinator; return its result, or raise its error, on all ranks. Collective."""
        with self.coordinator() as them:
            return them.broadcast(what, function)

    def combine(self, what: str, own: Callable[[], T], function: Callable[[list[T]], R]) -> R:
        """Call `own` on all ranks, and `function` with their values, in rank order, on the coordinator.

        All ranks return its result, or raise the error. Collective.
        """
        with self.coordinator() as them:
            return them.all_reduce(what, own, function)
