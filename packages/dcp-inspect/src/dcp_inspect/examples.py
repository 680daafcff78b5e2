"""Examples at the end of the commands' help pages; tests run each of them."""

from __future__ import annotations

__all__ = ["examples"]


def examples(*lines: str) -> str:
    """Return an epilog of a help page: command lines, each printed as it is; a comment may follow after `#`."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
