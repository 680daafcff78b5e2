"""Examples on help pages; tests run each of them."""

from __future__ import annotations


def examples(*lines: str) -> str:
    """Return command lines as the epilog of a help page."""
    return "\n".join(("\b", "Examples:", *(f"  {line}" for line in lines)))
