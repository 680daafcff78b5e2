"""`dcp prune`: remove all but the newest checkpoints of each run under a folder."""

from __future__ import annotations

from collections.abc import Iterator

import click

from dcp_inspect.examples import examples
from dcp_inspect.listing import find, look_at
from dcp_inspect.places import PLACE, is_uri, open_folder
from dcp_inspect.printing.output import confirm, count_bytes, json_option, print_json, say
from dcp_inspect.pruning import Pruning, choose
from dcp_inspect.removal import Removal, plan_removal, preview_removal, remove
from dcp_manifest import CheckpointNotFoundError

__all__ = ["command"]


@click.command(
    "prune",
    epilog=examples(
        "dcp prune runs --keep 3 --dry-run",
        "dcp prune runs --keep 1 --yes",
        "dcp prune s3://bucket/runs --keep 1 --yes",
    ),
)
@click.argument("path", type=PLACE)
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest valid ones of a run stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option(
    "--force", is_flag=True, help="Also those that may be newer than one that stays, though their step is lower."
)
@json_option
def command(path: str, keep: int, yes: bool, dry_run: bool, force: bool, as_json: bool) -> int:
    """Remove the checkpoints in and below PATH whose step is below those of the KEEP newest valid ones of their run.

    A run is the checkpoints in one folder whose names differ in the step only (step-100, step-200). Those without a
    step stay, whatever their age, and so do damaged ones, which are not counted: `dcp rm` removes them.

    One that was saved after one that stays, or whose note names a higher step, stays unless --force is given.
    """
    found = find(path)
    if not found and is_uri(path):  # an empty prefix and a misspelt one look the same
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below: check the address")
    pruning = choose([(one, look_at(one)) for one in found], keep, force=force)
    plan = preview_removal if dry_run else plan_removal
    removals = [plan(one.path, open_folder(one.path)) for one in pruning.removed]
    size = sum(removal.bytes for removal in removals)
    if removals and not (yes or dry_run):
        for removal in removals:
            say(f"  {removal.path}  {count_bytes(removal.bytes)}", err=True)
        confirm(f"Remove these {len(removals)} checkpoints, {count_bytes(size)}?")
    for removal in [] if dry_run else removals:
        remove(removal)
    if as_json:
        print_json(_as_json(path, pruning, removals, removed=not dry_run))
    else:
        for removal in removals:
            say(f"{'would remove' if dry_run else 'removed'} {removal.path}  {count_bytes(removal.bytes)}")
        for line in _summary(pruning, removals):
            say(line)
    return 0


def _as_json(path: str, pruning: Pruning, removals: list[Removal], *, removed: bool) -> dict[str, object]:
    return {
        "path": path,
        "removed": removed,
        "checkpoints": [str(removal.path) for removal in removals],
        "bytes": sum(removal.bytes for removal in removals),
        "kept": [one.path for one in pruning.kept],
        "invalid": [one.path for one in pruning.invalid],
        "doubtful": {one.path: reason for one, reason in pruning.doubtful},
        "without_step": [one.path for one in pruning.without_step],
        "refusals": {removal.path: removal.refusal for removal in removals if removal.refusal is not None},
    }


def _summary(pruning: Pruning, removals: list[Removal]) -> Iterator[str]:
    for removal in removals:
        if removal.refusal is not None:
            yield f"refused as it is, and nothing removed: {removal.refusal}"
    for one, reason in pruning.doubtful:
        yield f"stays {one.path}: {reason}; --force removes it"
    removed = len(pruning.removed)
    valid = removed + len(pruning.kept) + len(pruning.doubtful)
    damaged, unnumbered = len(pruning.invalid), len(pruning.without_step)
    stay = "is not valid stays" if damaged == 1 else "are not valid stay"
    left = f"; {damaged} that {stay}, see `dcp ls`" if damaged else ""
    yield f"{removed} of {valid} valid checkpoints, {count_bytes(sum(removal.bytes for removal in removals))}{left}"
    if unnumbered:
        yield f"{unnumbered} without a step {'stays' if unnumbered == 1 else 'stay'}: `dcp rm` removes one"
