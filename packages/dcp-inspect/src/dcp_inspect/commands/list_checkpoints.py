"""`dcp ls`: list the checkpoints under a folder, newest first, from their indexes and file sizes."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import click

from dcp_inspect.examples import examples
from dcp_inspect.listing import Listed, find, look_at
from dcp_inspect.places import PLACE, is_uri
from dcp_inspect.printing.output import Cell, age, count_bytes, json_option, print_json
from dcp_inspect.printing.table import print_table
from dcp_io import root_at
from dcp_manifest import CheckpointNotFoundError

__all__ = ["command"]


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
    """List the checkpoints in PATH and the folders below it, newest first: by step, then by creation time.

    Several runs follow one another, the one that saved last first. Times of files do not matter where steps are known.

    A checkpoint is valid if its index can be read and its files are there in full length. Their bytes are checked by
    `dcp verify`. Of the tiers of a run, which run.tiers.toml describes, all are listed. Saves that are running, and
    what is left of those that did not finish, are listed as such.
    """
    found = [look_at(one) for one in find(path, unfinished=True)]
    if as_json:
        print_json([asdict(one) for one in found])
        return 0
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {path} or below: a checkpoint has a file .metadata, which a save writes last"
        )
    _print(found, path)
    return 0


def _print(found: list[Listed], root: str) -> None:
    columns = ("checkpoint", "step", "size", "ranks", "values", "age", "state")
    now = time.time()
    rows = [_row(one, root, now) for one in found]
    print_table(columns, rows, right=columns[1:-1], drop=("ranks", "values", "age", "step"), wrap=("state",))


def _row(one: Listed, root: str, now: float) -> tuple[Cell, ...]:
    return (
        _below(one.path, root),
        "" if one.step is None else str(one.step),
        count_bytes(one.bytes),
        "" if one.world_size is None else str(one.world_size),
        "" if one.values is None else str(one.values),
        age(now - one.modified_seconds),
        ("valid", "green") if one.valid else (one.problem or "damaged", "red"),
    )


def _below(path: str, root: str) -> str:
    """Return the path relative to the folder that was asked for; the whole path in a root of several places."""
    if root_at(root) is not None:
        return path
    if is_uri(root):
        return path.removeprefix(root.rstrip("/")).strip("/") or "."
    return os.path.relpath(path, root)
