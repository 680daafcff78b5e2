"""The command that starts another Python interpreter for a module of ours."""

from __future__ import annotations

import sys

__all__ = ["module_command"]


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main(arguments)` of a module in a new interpreter.

    `python -m` would look for every module in the working folder first, where a `queue.py` of the user's could lie;
    its option `-P` is of Python 3.11. Here the search path is that of `PYTHONPATH` and of the installation alone.

    Args:
        module: Its name; it has a function `main` that takes a list of texts.
        arguments: For `main`.
    """
    code = f"import sys; sys.path = [*filter(None, sys.path)]; from {module} import main; main(sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]
