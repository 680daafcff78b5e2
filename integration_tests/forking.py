"""What processes have in common that import everything once and fork those that do the work."""

from __future__ import annotations

__all__ = ["WARNINGS"]

# From Python 3.12 on, forking a process with threads warns; those of torch's libraries are idle here.
WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")
"""Python's options for such a process: warnings are errors."""
