"""`is_adapter`: which packages adapt a framework. Needs the standard library alone, as `noxfile.py` imports it, too."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["is_adapter"]


def is_adapter(package: Path) -> bool:
    """Whether the package in a folder adapts a framework, which only `nox -s frameworks` installs."""
    return re.search(r"^adapter = true$", (package / "pyproject.toml").read_text(), re.MULTILINE) is not None
