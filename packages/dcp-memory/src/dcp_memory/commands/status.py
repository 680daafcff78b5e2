"""`dcp keeper status`: show the keepers of this user on this host."""

from __future__ import annotations

import click

from dcp_manifest import printable
from dcp_memory.commands.arguments import checked_runs
from dcp_memory.commands.showing import print_all
from dcp_memory.control import keeper_runs, keeper_status
from dcp_memory.errors import KeeperLostError

__all__ = ["status"]


@click.command("status")
@click.argument("runs", nargs=-1, metavar="[RUN]...", callback=checked_runs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(runs: tuple[str, ...], as_json: bool) -> int:
    """Show what keepers hold: those of all runs, or of the given ones.

    The exit code is 3 if a given run has none, or a keeper does not answer.
    """
    found, problems = [], []
    for run in runs or keeper_runs():
        try:
            one = keeper_status(run)
        except KeeperLostError as error:  # the others are shown all the same
            problems.append(str(error))
            continue
        if one is not None:
            found.append(one)
        elif runs:
            problems.append(f"{run}: no keeper runs on this host, for this user")
    print_all(found, as_json=as_json)
    for problem in problems:
        click.echo(printable(problem), err=True)
    return 3 if problems else 0
