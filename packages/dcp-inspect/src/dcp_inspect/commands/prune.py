"""`dcp prune`: remove all but each run's newest sound checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import click

from dcp_inspect.arguments import PLACE, is_uri, open_folder
from dcp_inspect.errors import UNREADABLE
from dcp_inspect.examples import examples
from dcp_inspect.listing import Listed, find, first_damage, look_at_all
from dcp_inspect.printing.output import confirm, count_bytes, json_option, metrics_text, print_json, say
from dcp_inspect.pruning import Pruning, choose
from dcp_inspect.removal import Removal, plan_removal, plan_smaller, preview_removal, remove
from dcp_manifest import CheckpointNotFoundError, FoundCheckpoint


@click.command(
    "prune",
    epilog=examples(
        "dcp prune runs --keep 3 --dry-run",
        "dcp prune runs --keep 1 --yes",
        "dcp prune s3://bucket/runs --keep 1 --yes",
        "dcp prune runs --keep 1 --keep-part model --yes",
    ),
)
@click.argument("path", type=PLACE)
@click.option("--keep", type=click.IntRange(1), required=True, help="How many of the newest sound ones of a run stay.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--no-verify", is_flag=True, help="Do not read those that stay: complete ones count as sound.")
@click.option(
    "--force", is_flag=True, help="Also those that may be newer than one that stays, though their step is lower."
)
@click.option(
    "--keep-part", "parts", multiple=True, help="Older ones keep this name and the names below it; may be repeated."
)
@json_option
def command(
    path: str, keep: int, yes: bool, dry_run: bool, no_verify: bool, force: bool, parts: tuple[str, ...], as_json: bool
) -> int:
    """Remove older checkpoints in PATH and the directories below it: each run keeps its KEEP newest sound checkpoints.

    The checkpoints in one directory are a run if their names differ only in the step (step-100, step-200). Before it
    removes anything, the command reads the checkpoints that it keeps, as `dcp verify` does. A damaged one stays, and an
    older one is kept in addition. The best checkpoints by the manager's KeepBest policy stay.

    Checkpoints without a step and incomplete checkpoints stay: `dcp rm` removes them. A checkpoint also stays if it was
    saved later than a kept one, or if its note has a higher step; --force removes it. Checkpoints to which a symbolic
    link points stay. The exit code is 4 if something cannot be read.
    """
    found = _find(path)
    listed = [*look_at_all(found, path)]
    unread: list[str] = []
    examine = None if no_verify else partial(_first_damage, unread)
    pruning = choose([*zip(found, listed, strict=True)], keep, force=force, examine=examine)
    removals = _plan(pruning, parts, dry_run=dry_run)
    if removals and not (yes or dry_run):
        for one, removal in zip(pruning.removed, removals, strict=True):
            say(f"  {_line(one, removal)}", err=True)
        for line in _stays(pruning):
            say(line, err=True)
        size = count_bytes(sum(removal.bytes for removal in removals))
        confirm(
            f"Remove {'from ' if parts else ''}these {len(removals)} checkpoint{'s' * (len(removals) != 1)}, {size}?"
        )
    for removal in [] if dry_run else removals:
        remove(removal)
    if as_json:
        print_json(_as_json(path, pruning, removals, removed=not dry_run))
    else:
        for one, removal in zip(pruning.removed, removals, strict=True):
            say(f"{'would remove' if dry_run else 'removed'} {_line(one, removal)}")
        for line in _summary(pruning, removals):
            say(line)
    return UNREADABLE if unread or any(one.unreadable for one in listed) else 0


def _find(path: str) -> list[FoundCheckpoint[Any]]:
    found = find(path)
    if not found and is_uri(path):  # an empty prefix and a misspelt one look the same
        raise CheckpointNotFoundError(f"there is no checkpoint in {path} or below: check the address")
    if [one.place.parts for one in found if not one.unreadable] == [()]:
        raise click.BadParameter(f"{path} is a checkpoint: pass the directory of its run, or remove it with `dcp rm`")
    return found


def _plan(pruning: Pruning, parts: tuple[str, ...], *, dry_run: bool) -> list[Removal]:
    if not parts:
        plan = preview_removal if dry_run else plan_removal
        return [plan(one.path, open_folder(one.path)) for one in pruning.removed]
    removals: dict[str, Removal] = {}
    failure: CheckpointNotFoundError | None = None
    for one in pruning.removed:
        try:
            removals[one.path] = plan_smaller(one.path, open_folder(one.path), keep=parts)
        except CheckpointNotFoundError as error:
            pruning.without_part.append((one, str(error)))
            failure = error
    if failure is not None and not removals:  # more likely a wrong name than a run without this part
        raise failure
    small = [one for one in pruning.removed if one.path in removals and not removals[one.path].bytes]  # made before
    pruning.kept.extend(small)
    pruning.removed[:] = [one for one in pruning.removed if one.path in removals and one not in small]
    return [removals[one.path] for one in pruning.removed]


def _first_damage(unread: list[str], one: Listed) -> str | None:
    problem, unreadable = first_damage(one.path)
    if unreadable:
        unread.append(one.path)
    return problem


def _line(one: Listed, removal: Removal) -> str:
    return f"{removal.what}  {count_bytes(removal.bytes)}{metrics_text(one.notes.metrics, before='  ')}"


def _as_json(path: str, pruning: Pruning, removals: list[Removal], *, removed: bool) -> dict[str, object]:
    return {
        "path": path,
        "removed": removed,
        "checkpoints": [str(removal.path) for removal in removals],
        "parts": {removal.path: removal.smaller.parts for removal in removals if removal.smaller is not None},
        "bytes": sum(removal.bytes for removal in removals),
        "kept": [one.path for one in pruning.kept],
        "best": {one.path: rules for one, rules in pruning.best},
        "damaged": {one.path: problem for one, problem in pruning.damaged},
        "incomplete": {one.path: one.problem for one in pruning.incomplete},
        "without_part": {one.path: reason for one, reason in pruning.without_part},
        "doubtful": {one.path: reason for one, reason in pruning.doubtful},
        "linked": {one.path: links for one, links in pruning.linked},
        "without_step": [one.path for one in pruning.without_step],
        "refusals": {removal.path: removal.refusal for removal in removals if removal.refusal is not None},
    }


def _stays(pruning: Pruning) -> Iterator[str]:
    for one, problem in pruning.damaged:
        yield f"stays {one.path}: damaged, so an older one stays for it: {problem}"
    for one, rules in pruning.best:
        yield f"stays {one.path}: the best by {rules}{metrics_text(one.notes.metrics, before='; ')}"
    for one, reason in pruning.doubtful:
        yield f"stays {one.path}: {reason}; --force removes it"
    for one, links in pruning.linked:
        yield f"stays {one.path}: a symbolic link points to it: {', '.join(links)}"
    for one, reason in pruning.without_part:
        yield f"stays {one.path}: {reason}"
    for one in pruning.incomplete:
        if one.unreadable:
            yield f"stays {one.path}: {one.problem}"


def _summary(pruning: Pruning, removals: list[Removal]) -> Iterator[str]:
    for removal in removals:
        if removal.refusal is not None:
            yield f"refused as it is, and nothing removed: {removal.refusal}"
    yield from _stays(pruning)
    removed = len(pruning.removed)
    with_reasons = (pruning.best, pruning.damaged, pruning.doubtful, pruning.without_part)
    complete = removed + len(pruning.kept) + len(pruning.linked) + sum(map(len, with_reasons))
    incomplete, unnumbered = len(pruning.incomplete), len(pruning.without_step)
    stay = "stays" if incomplete == 1 else "stay"
    left = f"; {incomplete} incomplete or quarantined {stay}, see `dcp ls`" if incomplete else ""
    checkpoints = f"{complete} complete checkpoint{'s' * (complete != 1)}"
    yield f"{removed} of {checkpoints}, {count_bytes(sum(one.bytes for one in removals))}{left}"
    if unnumbered:
        yield f"{unnumbered} without a step {'stays' if unnumbered == 1 else 'stay'}: `dcp rm` removes one"
