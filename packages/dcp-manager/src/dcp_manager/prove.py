"""Command `python -m dcp_manager.prove`: proves that a training script resumes exactly, or names what is missing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from dcp_core import DcpError
from dcp_manager.testing import RunFailedError
from dcp_manager.testing.prove_script import prove_script

__all__ = ["main"]

_DESCRIPTION = """\
Runs a training script to its end; runs it again, kills it (SIGKILL) after a save, and starts it a third time, so that
it resumes. Both ways are compared bit by bit after each step of the optimizer: losses, samples, parameters, optimizer,
scheduler, scaler, moving averages, buffers, random states. The first difference is shown by name, with what is probably
missing from the checkpoint.

The script saves with a CheckpointManager, or with save of dcp_all or dcp_core on all ranks, and resumes by itself when
it is started again. With --world-sizes 2,1 it is started on 2 ranks as by torchrun, and resumed on 2 and on 1. It runs
in a temporary folder with links to everything in the working folder, except for folders that have checkpoints. If it
writes to another place, pass that as an argument with {root}, an empty folder:
    python -m dcp_manager.prove train.py --out {root}
"""
_EPILOG = "Exit status: 0 equal, 1 different or not deterministic, 2 wrong arguments or the script failed."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status.

    Args:
        arguments: Arguments of the command line; None for those of this process.
    """
    given = _parser().parse_args(arguments)
    try:
        report = prove_script(
            given.script,
            given.arguments,
            kill_at_save=given.kill_at_save,
            world_sizes=given.world_sizes,
            tolerance=given.tolerance,
            ignore=given.ignore,
            folder=given.keep,
            timeout_seconds=given.timeout,
        )
    except (RunFailedError, DcpError, OSError, ValueError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    sys.stdout.write(f"{json.dumps(report.as_dict(), indent=2) if given.json else report}\n")
    return 0 if report.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcp_manager.prove",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kill-at-save", type=_at_least_one, default=1, metavar="N", help="kill after the N-th save (default: 1)")
    add("--world-sizes", type=_sizes, default=[1], metavar="N,…", help="ranks of the run, then of resumes (default: 1)")
    add("--tolerance", type=float, metavar="X", help="largest relative difference of losses on other numbers of ranks")
    add("--ignore", action="append", default=[], metavar="NAME", help="part that may differ, such as 'history*'")
    add("--keep", metavar="FOLDER", help="folder for checkpoints, records and output, which is kept")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="limit of each run (default: 600)")
    add("--json", action="store_true", help="print the report as JSON")
    add("script", help="the training script")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _sizes(text: str) -> list[int]:
    return [_at_least_one(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
