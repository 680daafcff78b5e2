"""Command line of a keeper: `python -m dcp_memory.keeper RUN`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dcp_memory.keeper.options import parse_arguments
from dcp_memory.keeper.process import keep_streams_open, run_detached, run_keeper

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper; returns the exit code.

    Example:
        ```sh
        python -m dcp_memory.keeper my-run --max-bytes 64G --detach
        ```
    """
    options, detach = parse_arguments(arguments)
    keep_streams_open()
    try:
        if detach:
            return run_detached(options)
        run_keeper(options)
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201 - a command
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
