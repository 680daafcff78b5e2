"""Advice of the libraries, given as Python, in the command's own options.

The packages below advise their callers: pass this argument, call that function. Whoever types a command needs an option
instead, or a plain sentence where the command has none.
"""

from __future__ import annotations

import os
import re
import sys

__all__ = ["OTHER_NAME", "in_options", "program"]

OTHER_NAME = "dcp-inspect"
"""Second name of the command: on many clusters `dcp` is the parallel copy of mpiFileUtils."""

_PHRASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), advice)
    for pattern, advice in (
        (
            r"[.;] [Ii]f you trust it, (?:load with|pass) .*",
            "; its values are made by code of that class, which the command never runs: it reads plain data only",
        ),
        (
            r", and overwrite=False; choose another id, or allow overwriting",
            "; choose another place, or add --overwrite",
        ),
        (r"or allow overwriting it", "or add --overwrite"),
        (r"\(\w+=[^`()]*, `(--[^`]+)`\)", r"(\1)"),
        (r" in a shell, or dcp_format\.convert\(.*\) in Python; .*", ""),
        (r"^include=", "--include "),
        (r"^exclude leaves", "--exclude leaves"),
        (
            r"pass them as storage_options, or by the environment",
            "give them by the environment, as for the storage's own tools",
        ),
        (r", as in a pathlib\.Path: write (\S+) as a string,", r": write \1,"),
        (r" \(options given: none\)", ""),
        (
            r"other formats have no place for one value per rank; load them with .*",
            "other formats have no place for one value per rank; leave them out (--exclude)",
        ),
        (r"\bcompression=('[^']*')", r"--compression \1"),
        (r"\brename_regex: ", "--rename-regex "),
    )
)


def in_options(message: str) -> str:
    """Return a message whose advice is for the command line, under the name by which the command was started."""
    for pattern, advice in _PHRASES:
        message = pattern.sub(advice, message)
    return message.replace("`dcp ", f"`{program()} ")


def program() -> str:
    """Return the name by which the command was started: `dcp-inspect` where `dcp` is another program, else `dcp`."""
    started = os.path.basename(sys.argv[0]) if sys.argv else ""
    return started if started == OTHER_NAME else "dcp"
