"""`dcp prune`: all but the newest checkpoints under a folder."""

from __future__ import annotations

from pathlib import Path

import click

from dcp_inspect.commands.list_checkpoints import look_at
from dcp_inspect.contents import existing_folder
from dcp_inspect.output import count_bytes, json_option, print_json
from dcp_inspect.removal import plan_removal, refuse_uri, remove
from dcp_manifest import find_checkpoints

__all__ = ["command"]


@click.command("prune")
@click.argument("path", type=click.Path())
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest valid ones stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
def command(path: str, keep: int, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Remove the checkpoints in and below PATH that are older than the KEEP newest valid ones.

    Damaged ones are not counted, and stay: `dcp rm --force` removes them.
    """
    refuse_uri(path)
    listed = [look_at(entry) for entry in find_checkpoints(existing_folder(path))]
    valid = [one for one in listed if one.valid]
    removals = [plan_removal(Path(one.path)) for one in valid[keep:]]
    size = sum(removal.bytes for removal in removals)
    if removals and not (yes or dry_run):
        for removal in removals:
            click.echo(f"  {removal.path}  {count_bytes(removal.bytes)}", err=True)
        click.confirm(f"Remove these {len(removals)} checkpoints, {count_bytes(size)}?", abort=True, err=True)
    for removal in [] if dry_run else removals:
        remove(removal)
    if as_json:
        names = [str(removal.path) for removal in removals]
        kept = [one.path for one in valid[:keep]]
        print_json({"path": path, "removed": not dry_run, "checkpoints": names, "bytes": size, "kept": kept})
    else:
        for removal in removals:
            click.echo(f"{'would remove' if dry_run else 'removed'} {removal.path}  {count_bytes(removal.bytes)}")
        damaged = len(listed) - len(valid)
        stay = "is not valid stays" if damaged == 1 else "are not valid stay"
        left = f"; {damaged} that {stay}, see `dcp ls`" if damaged else ""
        click.echo(f"{len(removals)} of {len(valid)} valid checkpoints, {count_bytes(size)}{left}")
    return 0
