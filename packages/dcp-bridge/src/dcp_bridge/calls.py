"""Calls of stock's objects: optional keyword arguments, and stock's BaseException converted to an error of ours."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException as StockException

from dcp_core import CheckpointException

__all__ = ["stock_errors", "takes_kwargs"]


@contextlib.contextmanager
def stock_errors(what: str) -> Iterator[None]:
    """Raise stock's CheckpointException, a BaseException, as ours.

    Args:
        what: What the stock object was asked for, for the message.
    """
    try:
        yield
    except StockException as error:
        failures = {rank: (failed[0], str(failed[0])) for rank, failed in error.failures.items()}
        raise CheckpointException(f"{what} of torch.distributed.checkpoint failed: {error}", failures) from error


def takes_kwargs(method: Callable[..., Any]) -> bool:
    """Whether a method takes the keywords of newer contracts: by stock's rule, if it has a parameter named `kwargs`."""
    return "kwargs" in inspect.signature(method).parameters
