"""Exclusion of this library from `torch.compile`: its functions run as they are written, never traced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["outside_compile"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_compile(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that `torch.compile` must neither trace nor compile, nor anything that it calls.

    Like `torch.compiler.disable`, but without importing the compiler, which takes seconds, if nothing else has imported
    it.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        run: Callable[P, R] = function if disable is None else disable(function)
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - where the compiler looks
    return call
