"""Collective error handling around a stream of tensors: agreement before it, exchange of errors after it.

In between no rank may stop: a rank that fails continues to communicate with scratch memory, and reports at the end.
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
"""Limit of the size of the pieces in which tensors are sent, bytes."""


class Errors:
    """Holder of this rank's first error, until it is reported to the others."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    def attempt(self, function: Callable[[], T]) -> T | None:
        """Return the function's result; None if the function fails, or an earlier one failed."""
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
    """Run a stream of tensors in the block; after it, an error of any rank is raised on all of them.

    Args:
        phase: Description of the operation, for error messages.
        alone: Whether the other ranks do not take part, so that errors are raised on this rank only.

    Ranks: every rank of the job, unless `alone`; collective.
    """
    errors = Errors()
    with make_coordinator(no_dist=alone or not dist.is_initialized(), errors=RANK_ERRORS) as coordinator:
        yield coordinator, errors
        coordinator.all_gather(phase, errors.tell)
