"""Errors of commands with `--json`: one JSON object on stdout, in place of the result."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_inspect.exit_codes import KINDS

__all__ = ["print_error", "wants_json"]


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line, which may be wrong, asks for JSON."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options


def print_error(message: str, code: int) -> None:
    """Print the JSON object of an error.

    Args:
        message: Message, as it is printed on stderr, without the name of the command before it.
        code: Exit code of the command.
    """
    from dcp_inspect.printing.output import print_json  # noqa: PLC0415 - takes numpy, which help need not wait for

    print_json({"error": {"kind": KINDS.get(code, "internal"), "message": message, "exit_code": code}})
