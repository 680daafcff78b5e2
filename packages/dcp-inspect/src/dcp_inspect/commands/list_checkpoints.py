"""`dcp ls`: list the checkpoints under a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import click

from dcp_inspect.arguments import PLACE, is_uri
from dcp_inspect.errors import UNREADABLE
from dcp_inspect.examples import examples
from dcp_inspect.listing import Listed, find, look_at_all
from dcp_inspect.printing.output import (
    Cell,
    age,
    console,
    count_bytes,
    json_option,
    metrics_text,
    print_json,
    print_line,
)
from dcp_inspect.printing.table import print_table
from dcp_io.stores.root import root_at
from dcp_manifest import CheckpointNotFoundError


@click.command(
    "ls",
    epilog=examples(
        "dcp ls runs",
        "dcp ls s3://bucket/runs",
        "dcp ls runs --json",
    ),
)
@click.argument("path", type=PLACE, default=".")
@json_option
def command(path: str, as_json: bool) -> int:
    """List the checkpoints in PATH and the directories below it, newest first: by step, then by creation time.

    Several runs follow one another, the one that saved last first. Times of files do not matter where steps are known.

    A checkpoint is complete if its index can be read and its files are there in full length. Only `dcp verify` reads
    their bytes. Of the tiers of a run, which run.tiers.toml describes, all are listed. Saves that are running, and
    leftovers of saves that did not finish, are listed as such. So are directories that cannot be read; the exit code is
    then 4.
    """
    found = [*look_at_all(find(path, unfinished=True), path)]
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {path} or below: a checkpoint has a file .metadata, which a save writes last"
        )
    if as_json:
        print_json([one.as_json() for one in found])
    else:
        _print(found, path)
    return UNREADABLE if any(one.unreadable for one in found) else 0


def _print(found: list[Listed], root: str) -> None:
    metrics = ("metrics",) if any(one.notes.metrics for one in found) else ()
    columns = ("checkpoint", "step", "size", "ranks", "values", "age", *metrics, "state")
    now = time.time()
    rows = [_row(one, root, now, metrics) for one in found]
    print_table(columns, rows, right=columns[1:6], drop=("ranks", "values", "age", "metrics", "step"), wrap=("state",))
    if console().is_terminal:
        print_line(("complete: index and file sizes match; `dcp verify -r` reads the bytes", "dim"))


def _row(one: Listed, root: str, now: float, metrics: Sequence[str]) -> tuple[Cell, ...]:
    return (
        _below(one.path, root),
        "" if one.step is None else str(one.step),
        "" if one.unreadable and not one.bytes else count_bytes(one.bytes),
        "" if one.world_size is None else str(one.world_size),
        "" if one.values is None else str(one.values),
        age(now - one.modified_seconds) if one.modified_seconds else "",
        *(metrics_text(one.notes.metrics) for _ in metrics),
        ("complete", "green") if one.complete else (one.problem or "damaged", "red"),
    )


def _below(path: str, root: str) -> str:
    if root_at(root) is not None:
        return path
    if is_uri(root):
        return path.removeprefix(root.rstrip("/")).strip("/") or "."
    return os.path.relpath(path, root)
