"""`dcp keeper start`: start the keeper of a run in the background."""

from __future__ import annotations

import click

from dcp_memory.commands.arguments import Seconds, checked_runs
from dcp_memory.commands.showing import print_all
from dcp_memory.control import start_keeper

__all__ = ["start"]


@click.command("start")
@click.argument("run", callback=checked_runs)
@click.option("--max-bytes", help="Limit of its memory, such as 64G; default: half of what is available.")
@click.option("--generations", type=click.IntRange(1), help="Checkpoints that the run keeps in it; default: 2.")
@click.option("--idle-seconds", type=Seconds(), help="End after so long without a process that saves; default: 1800.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def start(run: str, max_bytes: str | None, generations: int | None, idle_seconds: float | None, as_json: bool) -> int:
    """Start the keeper of RUN, unless it runs, and show it."""
    found = start_keeper(run, max_bytes=max_bytes, generations=generations, idle_seconds=idle_seconds)
    print_all([found], as_json=as_json)
    return 0
