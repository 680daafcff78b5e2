"""Error conversion for calls of stock's objects: stock's CheckpointException becomes `dcp_core.CheckpointException`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException as StockException

from dcp_core import CheckpointException

__all__ = ["stock_errors"]


@contextlib.contextmanager
def stock_errors(what: str) -> Iterator[None]:
    """Context manager that converts stock's CheckpointException, a BaseException, to this project's exception class.

    Args:
        what: Name of the method that is called, for the error message.
    """
    try:
        yield
    except StockException as error:
        failures = {rank: (failed[0], str(failed[0])) for rank, failed in error.failures.items()}
        raise CheckpointException(f"{what} of torch.distributed.checkpoint failed: {error}", failures) from error
