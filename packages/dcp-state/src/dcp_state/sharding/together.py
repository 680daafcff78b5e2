"""What all ranks do together around a stream of tensors: agree before it, learn of each other's errors after it.

Between the two no rank may stop: one that cannot go on keeps taking part with scratch memory, and says so at the end.
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
"""Tensors travel in pieces of at most this size."""


class Errors:
    """The first error of this rank, kept until the others are told."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, function: Callable[[], T]) -> T | None:
        """The function's value, or None once anything has failed."""
        if self.first is not None:
            return None
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - raised again on all ranks, when the stream is over
            self.first = error
            return None

    def tell(self) -> None:
        """Raise the error, if there is one."""
        if self.first is not None:
            raise self.first


@contextmanager
def all_ranks(phase: str, *, alone: bool = False) -> Iterator[tuple[Coordinator, Errors]]:
    """A stream of tensors in the block; after it, an error of any rank is raised on all of them.

    Args:
        phase: What is done, for messages.
        alone: Other ranks do something else, so none can be told.

    Ranks: every rank of the job, unless `alone`; collective.
    """
    errors = Errors()
    with make_coordinator(no_dist=alone or not dist.is_initialized(), errors=RANK_ERRORS) as coordinator:
        yield coordinator, errors
        coordinator.all_gather(phase, errors.tell)
