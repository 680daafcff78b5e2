"""Stock's command line `format_utils`: `torch_to_dcp` and `dcp_to_torch`. `dcp convert` has more options.

Source: torch 2.13 `torch.distributed.checkpoint.format_utils` run as a script (arguments, output).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from dcp_format.torch_save.stock_calls import dcp_to_torch_save, torch_save_to_dcp

__all__ = ["main"]

_MODES: dict[str, tuple[Callable[[str], bool], Callable[[str, str], None]]] = {
    "torch_to_dcp": (os.path.isfile, torch_save_to_dcp),
    "dcp_to_torch": (os.path.isdir, dcp_to_torch_save),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run stock's `format_utils` command line.

    Args:
        arguments: Mode, source and destination; None reads them from the process's command line.

    Returns:
        The exit status: 0, or 1 if there is nothing to convert (stock returns 0).

    Raises:
        DcpError: The source cannot be read, or the destination cannot be written.
        SystemExit: The arguments are wrong.
    """
    parser = argparse.ArgumentParser(prog="python -m dcp_all.format_utils")
    parser.add_argument("mode", choices=list(_MODES), help="Conversion mode")
    parser.add_argument("src", help="Path to the source model")
    parser.add_argument("dst", help="Path to the destination model")
    chosen = parser.parse_args(arguments)
    is_there, convert = _MODES[chosen.mode]
    sys.stdout.write(f"Converting checkpoint from {chosen.src} to {chosen.dst} using method: '{chosen.mode}'\n")
    if not is_there(chosen.src):
        sys.stdout.write(f"No checkpoint found at {chosen.src}. Skipping conversion.\n")
        return 1
    convert(chosen.src, chosen.dst)
    return 0
