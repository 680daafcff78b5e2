"""`dcp keeper status`: show the keepers of this user on this host."""

from __future__ import annotations

import click

from dcp_memory.commands.showing import print_all
from dcp_memory.control import keeper_runs, keeper_status

__all__ = ["status"]


@click.command("status")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(runs: tuple[str, ...], as_json: bool) -> int:
    """Show what keepers hold: those of all runs, or of the given ones.

    The exit code is 3 if a given run has none.
    """
    found = {run: keeper_status(run) for run in runs or keeper_runs()}
    print_all([each for each in found.values() if each is not None], as_json=as_json)
    missing = [run for run in runs if found[run] is None]
    for run in missing:
        click.echo(f"{run}: no keeper runs on this host, for this user", err=True)
    return 3 if missing else 0
