"""Positional storage arguments, as in stock's deprecated calls `save(state_dict, writer)`, `load(state_dict, reader)`.

Source: torch 2.13 `torch.distributed.checkpoint.utils._api_bc_check` (which calls are accepted, and the warning).
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["with_positional_storage"]

P = ParamSpec("P")
R = TypeVar("R")


def with_positional_storage(parameter: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that converts a second positional argument into a keyword argument, with a warning.

    Args:
        parameter: Name of the keyword argument: `storage_writer` or `storage_reader`.

    Raises:
        TypeError: The decorated function got the argument both by position and by keyword, or got a path.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        name = function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) != 2:
                return function(*args, **kwargs)
            if parameter in kwargs:
                raise TypeError(f"{name}() got its {parameter} twice: as a positional argument and by name")
            if isinstance(args[1], str | os.PathLike):  # a habit from `torch.save(state, path)`
                raise TypeError(
                    f"{name}(): {os.fspath(args[1])!r} is no {parameter}: pass checkpoint_id={os.fspath(args[1])!r}"
                )
            warnings.warn(
                f"the argument order of {name} has changed: pass {parameter}= by name", UserWarning, stacklevel=2
            )
            kwargs[parameter] = args[1]
            return function(*args[:1], **kwargs)  # type: ignore[arg-type]

        return call

    return decorate
