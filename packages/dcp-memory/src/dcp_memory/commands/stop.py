"""`dcp keeper stop`: stop keepers; what they hold is lost."""

from __future__ import annotations

import json

import click

from dcp_manifest import printable
from dcp_memory.commands.arguments import Seconds, checked_runs
from dcp_memory.control import STOP_SECONDS, stop_keeper

__all__ = ["stop"]


@click.command("stop")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", callback=checked_runs)
@click.option("--kill", is_flag=True, help="Kill a keeper that does not end in time.")
@click.option("--seconds", type=Seconds(), default=STOP_SECONDS, help="Time that each has to end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def stop(runs: tuple[str, ...], kill: bool, seconds: float, as_json: bool) -> int:
    """Stop the keepers of runs, and wait until they have ended. The checkpoints in their memory are lost.

    The exit code is 0 also for a run that has none.
    """
    stopped = {run: stop_keeper(run, seconds=seconds, kill=kill) for run in runs}
    if as_json:
        click.echo(json.dumps([{"run": run, "stopped": each} for run, each in stopped.items()], indent=2))
        return 0
    for run, each in stopped.items():
        click.echo(printable(f"{run}: stopped" if each else f"{run}: no keeper runs here"))
    return 0
