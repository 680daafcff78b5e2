"""`dcp rm`: remove one checkpoint, its index first."""

from __future__ import annotations

import click

from dcp_inspect.examples import examples
from dcp_inspect.places import PLACE, open_folder
from dcp_inspect.printing.output import confirm, count_bytes, json_option, print_json, say
from dcp_inspect.removal import plan_removal, preview_removal, remove

__all__ = ["command"]


@click.command(
    "rm",
    epilog=examples(
        "dcp rm runs/step-100 --dry-run",
        "dcp rm runs/step-100 --yes",
        "dcp rm s3://bucket/runs/step-100 --yes",
    ),
)
@click.argument("path", type=PLACE)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--force", is_flag=True, help="Also if it is damaged, or a process seems to save or read it.")
@json_option
def command(path: str, yes: bool, dry_run: bool, force: bool, as_json: bool) -> int:
    """Remove the checkpoint in PATH, a folder or a URI: its index, then all files of saves. Other files stay.

    It is refused while a process saves or reads it. What an unfinished save of PyTorch left may belong to a running
    one: it is removed when nothing has been written for an hour. --dry-run says whether --force is needed.
    """
    plan = preview_removal if dry_run else plan_removal
    removal = plan(path, open_folder(path), force=force)
    what = f"{path}: {_files(len(removal.indexes) + len(removal.files))}, {count_bytes(removal.bytes)}"
    if not (yes or dry_run):
        confirm(f"Remove {what}?")
    if not dry_run:
        remove(removal)
    if as_json:
        names = [*removal.indexes, *removal.files]
        facts = {"path": path, "removed": not dry_run, "files": names, "bytes": removal.bytes, "kept": removal.others}
        print_json({**facts, "refusal": removal.refusal})
        return 0
    others = len(removal.others)
    kept = f"; {_files(others, 'other ')} {'stays' if others == 1 else 'stay'}" if others else ""
    say(f"{'would remove' if dry_run else 'removed'} {what}{kept}")
    if removal.refusal is not None:
        say(f"with --force only: {removal.refusal}")
    return 0


def _files(count: int, which: str = "") -> str:
    return f"{count} {which}file{'s' * (count != 1)}"
