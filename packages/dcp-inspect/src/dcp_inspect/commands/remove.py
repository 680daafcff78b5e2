"""`dcp rm`: remove checkpoints, always the index first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import click

from dcp_inspect.arguments import PLACE, open_folder
from dcp_inspect.errors import foreseen, in_options, worst
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import confirm, count_bytes, json_option, print_json, say
from dcp_inspect.removal import Removal, plan_removal, plan_smaller, preview_removal, remove


@click.command(
    "rm",
    epilog=examples(
        "dcp rm runs/step-100 --dry-run",
        "dcp rm runs/step-100 runs/step-200 --yes",
        "dcp rm s3://bucket/runs/step-100 --yes",
        "dcp rm runs/step-100 --part step --yes",
    ),
)
@click.argument("paths", type=PLACE, nargs=-1, required=True, metavar="PATH...")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--force", is_flag=True, help="Also if its index is damaged, or something seems to use it.")
@click.option("--part", "parts", multiple=True, help="Remove only this name and the names below it; may be repeated.")
@json_option
def command(
    paths: tuple[str, ...], yes: bool, dry_run: bool, force: bool, parts: tuple[str, ...], as_json: bool
) -> int:
    """Remove the checkpoint in each PATH, a directory or a URI: its index, then all files of saves. Other files stay.

    Damaged or missing data files do not matter; a damaged index needs --force. A checkpoint that a process saves or
    reads, or a symbolic link points to, is refused. Files of an unfinished save of PyTorch may belong
    to a running save: they are refused until nothing has been written for an hour. --dry-run says whether --force is
    needed.

    With --part, a smaller checkpoint stays, which PyTorch also reads. Values that stay are copied first if they share
    a file with removed values. An interruption leaves the old or the smaller checkpoint.
    """
    if parts and force:
        raise click.UsageError("--force and --part exclude each other: a checkpoint in use is not made smaller")
    plan = (
        partial(plan_smaller, drop=parts)
        if parts
        else partial(preview_removal if dry_run else plan_removal, force=force)
    )
    removals, done = [], _Outcome()
    for path in dict.fromkeys(paths):
        with done.errors_of(path, alone=len(paths) == 1):
            removals.append(plan(path, open_folder(path)))
    if removals and not (yes or dry_run):
        for removal in removals[1:] and removals:
            say(f"  {_what(removal)}", err=True)
        several = f"these {len(removals)} checkpoints, {count_bytes(sum(one.bytes for one in removals))}"
        confirm(f"Remove {several if len(removals) > 1 else _what(removals[0])}?")
    for removal in removals:
        with done.errors_of(removal.path, alone=len(paths) == 1):
            if not dry_run:
                remove(removal)
            done.add(removal, removed=not dry_run)
            if not as_json:
                _print(removal, dry_run=dry_run)
    if as_json:
        print_json(done.facts[0] if len(paths) == 1 else {"checkpoints": done.facts})
    return worst(done.codes)


class _Outcome:
    def __init__(self) -> None:
        self.facts: list[dict[str, object]] = []
        self.codes: list[int] = []

    def add(self, removal: Removal, *, removed: bool) -> None:
        names = [*removal.indexes, *removal.files]
        parts = None if removal.smaller is None else removal.smaller.parts
        facts = {"path": removal.path, "removed": removed, "files": names, "parts": parts, "bytes": removal.bytes}
        self.facts.append({**facts, "kept": removal.others, "refusal": removal.refusal})

    @contextlib.contextmanager
    def errors_of(self, path: str, *, alone: bool) -> Iterator[None]:
        """Print an error and go on, unless there is only one path."""
        try:
            yield
        except Exception as error:
            known = None if alone else foreseen(error)
            if known is None:
                raise
            say(f"dcp: {in_options(known[1])}", err=True)
            self.codes.append(known[0])
            self.facts.append({"path": path, "removed": False, "refusal": known[1]})


def _print(removal: Removal, *, dry_run: bool) -> None:
    others = len(removal.others)
    kept = f"; {_files(others, 'other ')} {'stays' if others == 1 else 'stay'}" if others else ""
    say(f"{'would remove' if dry_run else 'removed'} {_what(removal)}{kept}")
    if removal.refusal is not None:
        say(f"with --force only: {removal.refusal}")


def _what(removal: Removal) -> str:
    if removal.smaller is not None:
        return f"{removal.what}: {count_bytes(removal.bytes)}"
    return f"{removal.path}: {_files(len(removal.indexes) + len(removal.files))}, {count_bytes(removal.bytes)}"


def _files(count: int, which: str = "") -> str:
    return f"{count} {which}file{'s' * (count != 1)}"
