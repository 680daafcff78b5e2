"""Decisions that all ranks make together, each in a phase with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_core import PeerOptions
from dcp_core.errors import RANK_ERRORS
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, Coordinator, make_coordinator

__all__ = ["Ranks"]

T = TypeVar("T")
R = TypeVar("R")


class Ranks:
    """Group of ranks that manage checkpoints together.

    Args:
        process_group: Process group of the ranks; None for all ranks.
        no_dist: Whether this process works alone.
        timeout_seconds: Limit of the time that ranks wait for each other in one phase.
        peers: Options of the connections by which ranks watch each other; None for the defaults.
    """

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
        """Return a `Coordinator` for one decision.

        Ranks: every rank of the group, with calls in the same order.
        """
        return make_coordinator(
            self.process_group,
            no_dist=self.no_dist,
            timeout_seconds=self.timeout_seconds,
            peers=self.peers,
            errors=RANK_ERRORS,
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments by which `save` and `load` of `dcp_core` take these ranks; they have a limit of time beside."""
        return {"process_group": self.process_group, "no_dist": self.no_dist, "peers": self.peers}

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator, which decides and maintains the storage."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return 0 if self.alone else dist.get_rank(self.process_group)

    @property
    def alone(self) -> bool:
        """Whether this rank is the only one in the group."""
        if self.no_dist or not (dist.is_available() and dist.is_initialized()):
            return True
        return dist.get_world_size(self.process_group) == 1

    def decide(self, what: str, function: Callable[[], T]) -> T:
        """Call `function` on the coordinator, and return its result, or raise its error, on all ranks.

        Args:
            what: Description of the decision, for error messages.
            function: Function to call.

        Ranks: every rank of the group; collective.
        """
        with self.coordinator() as them:
            return them.broadcast(what, function)

    def combine(self, what: str, own: Callable[[], T], function: Callable[[list[T]], R]) -> R:
        """Gather values of all ranks; return the coordinator's conclusion from them, or raise an error, on all ranks.

        Args:
            what: Description of the decision, for error messages.
            own: Function that returns this rank's value.
            function: Function (values in rank order) → conclusion; called on the coordinator only.

        Ranks: every rank of the group; collective.
        """
        with self.coordinator() as them:
            return them.all_reduce(what, own, function)
