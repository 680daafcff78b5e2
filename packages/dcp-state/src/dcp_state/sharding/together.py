"""Collective error handling for a sequence of tensor transfers: ranks exchange errors before and after it.

In between no rank may stop: a rank that fails continues to communicate, with scratch memory, and reports its error at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from dcp_core.errors import RANK_ERRORS
from dcp_ranks import Coordinator, make_coordinator

__all__ = ["PIECE_BYTES", "Errors", "all_ranks"]

T = TypeVar("T")
PIECE_BYTES = 16 << 20
"""Maximum size of the pieces in which tensors are sent, bytes."""


class Errors:
    """Holder of this rank's first error, until the other ranks are notified of it."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, function: Callable[[], T]) -> T | None:
        """Call the function and return its result; None if it raises an error. After an error, nothing is called."""
        if self.first is not None:
            return None
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - raised again on all ranks, when the stream is over
            self.first = error
            return None

    def tell(self) -> None:
        """Raise this rank's first error, if there is one."""
        if self.first is not None:
            raise self.first


@contextmanager
def all_ranks(phase: str, *, alone: bool = False) -> Iterator[tuple[Coordinator, Errors]]:
    """Context manager for a sequence of tensor transfers; at its end, an error of any rank is raised on all ranks.

    The block gets the coordinator for its collectives, and an `Errors`, by which it calls what may fail on one rank.

    Args:
        phase: Description of the transfers, for error messages.
        alone: Whether only this rank runs the block; errors are then raised on this rank only.

    Ranks: every rank of the job, unless `alone`; collective.
    """
    errors = Errors()
    with make_coordinator(no_dist=alone or not dist.is_initialized(), errors=RANK_ERRORS) as coordinator:
        yield coordinator, errors
        coordinator.all_gather(phase, errors.tell)
