"""`python -m integration_tests.demo [--out FOLDER]`: run the story, print the tables, write the plot.

Exit status: 0 when every promise was kept, 1 otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from integration_tests.demo import report, story
from integration_tests.demo.screen import Screen

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Run the demo; see the module's text."""
    parser = argparse.ArgumentParser(prog="demo", description="Train, be killed in a save, resume; real weights.")
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the plot and the checkpoints")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints and logs")
    options = parser.parse_args(arguments)
    work = options.out.resolve() / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    start = time.monotonic()
    with Screen(console) as screen:
        results = story.run(work, screen)
    report.print_tables(results, console)
    picture = options.out.resolve() / "loss.png"
    report.plot(results, picture)
    if not options.keep:
        shutil.rmtree(work)
    console.print(f"{time.monotonic() - start:.0f} s; loss curves: {picture}", soft_wrap=True)
    return 0 if results.all_kept() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
