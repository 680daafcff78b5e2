"""Counting the functions that some work passes through, by a profile hook in every thread of this process."""

from __future__ import annotations

import functools
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
    switches: int = 0
    """Calls into another module than that of the call before, of one thread."""

    @property
    def modules(self) -> list[str]:
        """The modules of the functions, in the order in which they were first called."""
        return list(dict.fromkeys(module for module, _ in self.calls))

    def figures(self) -> dict[str, int]:
        """Numbers of functions, modules and calls, the depth, and the switches between modules."""
        return {
            "functions": len(self.calls),
            "modules": len(self.modules),
            "calls": self.calls.total(),
            "depth": self.depth,
            "switches": self.switches,
        }


@contextmanager
def counted(is_counted: Callable[[str], bool]) -> Iterator[CallPath]:
    """Count what is called inside, in this thread and in threads that it starts.

    What an import runs is not counted: neither bodies of modules and classes nor what they call.

    Args:
        is_counted: Whether the functions of a file, by its path, are counted.
    """
    found = CallPath()
    seen = threading.local()

    @functools.cache
    def of_interest(code: CodeType) -> bool:
        return _is_function(code) and is_counted(code.co_filename)

    def hook(frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not of_interest(frame.f_code):
            return
        step = 1 if event == "call" else -1
        seen.depth = getattr(seen, "depth", 0) + step
        found.depth = max(found.depth, seen.depth)
        if event == "call" and not _is_importing(frame):
            name = _name(frame)
            found.calls[name] += 1
            found.switches += getattr(seen, "module", name[0]) != name[0]
            seen.module = name[0]

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
