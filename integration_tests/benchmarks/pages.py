"""Figures on the pages of the docs: what stands between two marks is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["replace_figures"]

_END = "<!-- end of figures -->"


def replace_figures(page: Path, module: str, lines: Sequence[str]) -> None:
    """Put lines between the marks of a benchmark.

    Args:
        page: Has `<!-- figures: python -m MODULE -->` and, behind it, `<!-- end of figures -->`.
        module: Of the benchmark.
        lines: Markdown.

    Raises:
        ValueError: The page has no such marks.
    """
    begin = f"<!-- figures: python -m {module} -->"
    head, found, rest = page.read_text().partition(begin)
    _, ended, tail = rest.partition(_END)
    if not found or not ended:
        raise ValueError(f"{page} does not have the marks {begin} and {_END}")
    page.write_text(head + found + "\n\n" + "\n".join(lines) + "\n\n" + ended + tail)
