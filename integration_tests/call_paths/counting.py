"""Counting the functions that some work passes through, by a profile hook in every thread of this process."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

__all__ = ["CallPath", "counted"]


@dataclass(slots=True)
class CallPath:
    """What was called, of the source files that are counted."""

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls by (module, function). Comprehensions belong to the function that they are in."""
    depth: int = 0
    """The most frames of the counted files that stood on one thread's stack."""

    @property
    def modules(self) -> set[str]:
        """The modules of the functions."""
        return {module for module, _ in self.calls}

    def figures(self) -> dict[str, int]:
        """Numbers of functions, modules and calls, and the depth."""
        return {
            "functions": len(self.calls),
            "modules": len(self.modules),
            "calls": self.calls.total(),
            "depth": self.depth,
        }


@contextmanager
def counted(is_counted: Callable[[str], bool]) -> Iterator[CallPath]:
    """Count what is called inside, in this thread and in threads that it starts.

    What an import runs is not counted: neither bodies of modules and classes nor what they call.

    Args:
        is_counted: Whether the functions of a file, by its path, are counted.
    """
    found = CallPath()
    depths = threading.local()

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if (
            event not in ("call", "return")
            or not _is_function(frame.f_code)
            or not is_counted(frame.f_code.co_filename)
        ):
            return
        step = 1 if event == "call" else -1
        depths.now = getattr(depths, "now", 0) + step
        found.depth = max(found.depth, depths.now)
        if event == "call" and not _is_importing(frame):
            found.calls[_name(frame)] += 1

    threading.setprofile(hook)
    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _is_function(code: CodeType) -> bool:
    """Not the body of a module or a class, nor a comprehension, which is a call of its own before Python 3.12."""
    return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>")


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _name(frame: FrameType) -> tuple[str, str]:
    code = frame.f_code
    return frame.f_globals.get("__name__", "?"), getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")
