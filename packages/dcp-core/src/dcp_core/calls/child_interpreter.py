"""The command line that starts a child Python interpreter for a module of this project."""

from __future__ import annotations

import sys

__all__ = ["module_command"]


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that calls `main(arguments)` of a module in a new interpreter.

    `python -m` would look for every module in the working folder first, where the user may have a `queue.py`; its
    option `-P` exists only since Python 3.11. Here modules are only found through `PYTHONPATH` and in the installation.

    Args:
        module: Name of the module, which has a function `main` that takes a list of strings.
        arguments: Arguments passed to `main`.
    """
    code = f"import sys; sys.path = [*filter(None, sys.path)]; from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]
