"""Convert errors of stock's objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException as StockException

from dcp_core import CheckpointException


@contextlib.contextmanager
def stock_errors(what: str) -> Iterator[None]:
    """Convert stock's CheckpointException, a BaseException, raised by the method `what`, to ours."""
    try:
        yield
    except StockException as error:
        failures = {rank: (failed[0], str(failed[0])) for rank, failed in error.failures.items()}
        raise CheckpointException(f"{what} of torch.distributed.checkpoint failed: {error}", failures) from error
