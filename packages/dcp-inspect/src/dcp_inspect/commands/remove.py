"""`dcp rm`: one checkpoint, its index first."""

from __future__ import annotations

from pathlib import Path

import click

from dcp_inspect.output import count_bytes, json_option, print_json
from dcp_inspect.removal import plan_removal, refuse_uri, remove

__all__ = ["command"]


@click.command("rm")
@click.argument("path", type=click.Path())
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--force", is_flag=True, help="Also if it is damaged, or somebody seems to save or read it.")
@json_option
def command(path: str, yes: bool, dry_run: bool, force: bool, as_json: bool) -> int:
    """Remove the checkpoint in PATH: its index, then all files of saves. Other files stay.

    It is refused while a save writes there or somebody reads it.
    """
    refuse_uri(path)
    removal = plan_removal(Path(path), force=force)
    what = f"{path}: {_files(len(removal.indexes) + len(removal.files))}, {count_bytes(removal.bytes)}"
    if not (yes or dry_run):
        click.confirm(f"Remove {what}?", abort=True, err=True)
    if not dry_run:
        remove(removal)
    if as_json:
        names = [*removal.indexes, *removal.files]
        print_json(
            {"path": path, "removed": not dry_run, "files": names, "bytes": removal.bytes, "kept": removal.others}
        )
    else:
        others = len(removal.others)
        kept = f"; {_files(others, 'other ')} {'stays' if others == 1 else 'stay'}" if others else ""
        click.echo(f"{'would remove' if dry_run else 'removed'} {what}{kept}")
    return 0


def _files(count: int, which: str = "") -> str:
    return f"{count} {which}file{'s' * (count != 1)}"
