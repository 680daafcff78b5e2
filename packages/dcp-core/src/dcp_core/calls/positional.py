"""Positional storage arguments, as in stock's deprecated calls `save(state_dict, writer)`, `load(state_dict, reader)`.

Source: torch 2.13 `torch.distributed.checkpoint.utils._api_bc_check` (which calls are accepted, and the warning).
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

__all__ = ["refuse_path", "with_positional_storage", "without_positional_path"]

P = ParamSpec("P")
R = TypeVar("R")


def refuse_path(function: str, value: object, parameter: str | None = None) -> None:
    """Raise TypeError if an argument is a path, a habit from `torch.save(state, path)`; the message has its right name.

    Args:
        function: Name of the called function.
        value: The argument.
        parameter: Name of the parameter that got the argument; None if there is no such positional parameter.
    """
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        problem = "needs its name" if parameter is None else f"is no {parameter}"
        raise TypeError(f"{function}(): {path!r} {problem}: pass checkpoint_id={path!r}")


def without_positional_path(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose last positional parameter is `state_dict`: a path after it gets a clear TypeError."""
    names = [
        each.name for each in inspect.signature(function).parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD
    ]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) > len(names):
            refuse_path(function.__name__, args[len(names)])
        return function(*args, **kwargs)

    return call


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
            if isinstance(args[1], Mapping):
                raise TypeError(
                    f"{name}(): a state dict is no {parameter}: pass it first, and the path as checkpoint_id="
                )
            refuse_path(name, args[1], parameter)
            warnings.warn(
                f"the argument order of {name} has changed: pass {parameter}= by name", UserWarning, stacklevel=2
            )
            kwargs[parameter] = args[1]
            return function(*args[:1], **kwargs)  # type: ignore[arg-type]

        return call

    return decorate
