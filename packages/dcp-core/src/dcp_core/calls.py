"""Decorators for public functions, and the command line of a child interpreter."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def refuse_path(function: str, value: object, parameter: str | None = None) -> None:
    """Raise TypeError for a path, a habit from `torch.save`."""
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        problem = "needs its name" if parameter is None else f"is not a {parameter}"
        raise TypeError(f"{function}(): {path!r} {problem}: pass checkpoint_id={path!r}")


def without_positional_path(function: Callable[P, R]) -> Callable[P, R]:
    """Let a positional path raise TypeError."""
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
    """Like `outside_compile`, but accept `parameter` as second argument, with a warning."""
    return functools.partial(outside_compile, storage=parameter)


def outside_compile(function: Callable[P, R], *, storage: str | None = None) -> Callable[P, R]:
    """Like `torch.compiler.disable`, but without importing the compiler."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if storage is not None and len(args) == 2:
            kwargs[storage] = _positional(function.__name__, storage, args[1], kwargs)
            args = args[:1]  # type: ignore[assignment]
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        run: Callable[P, R] = function if disable is None else disable(function)
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - where the compiler looks
    return call


def _positional(name: str, parameter: str, value: object, kwargs: Mapping[str, object]) -> object:
    if parameter in kwargs:
        raise TypeError(f"{name}() got its {parameter} twice: as a positional argument and by name")
    if isinstance(value, Mapping):
        raise TypeError(f"{name}(): a state dict is not a {parameter}: pass it first, and the path as checkpoint_id=")
    refuse_path(name, value, parameter)
    warnings.warn(f"the argument order of {name} has changed: pass {parameter}= by name", UserWarning, stacklevel=3)
    return value


def module_command(module: str, *arguments: str) -> list[str]:
    """Return a command line for `main(arguments)` that, unlike `python -m`, ignores the working directory's modules."""
    code = f"import sys; sys.path = [*filter(None, sys.path)]; from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]
