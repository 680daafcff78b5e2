"""Decorator that excludes a function from `torch.compile`: the function is never traced or compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["outside_compile"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that `torch.compile` traces neither the function nor its callees.

    Works like `torch.compiler.disable`, but does not import the compiler, which would take seconds.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        run: Callable[P, R] = function if disable is None else disable(function)
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - where the compiler looks
    return call
