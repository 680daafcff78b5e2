"""Command line that runs a module of this project in a child Python interpreter."""

from __future__ import annotations

import sys

__all__ = ["module_command"]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that calls the function `main` of a module in a new Python interpreter.

    Unlike `python -m`, the command does not import modules from the working folder, where the user may have a
    `queue.py`. (`python -P` does the same, but only since Python 3.11.)

    Args:
        module: Import name of a module with a function `main` that takes a list of strings.
        arguments: Strings to pass to `main`.
    """
    code = f"import sys; sys.path = [*filter(None, sys.path)]; from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]
