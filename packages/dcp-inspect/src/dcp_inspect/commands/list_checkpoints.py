"""`dcp ls`: the checkpoints under a folder, newest first, from their indexes and the sizes of their files."""

from __future__ import annotations

import os
import time
from dataclasses import asdict

import click

from dcp_inspect.contents import is_uri
from dcp_inspect.listing import Listed, find, look_at
from dcp_inspect.output import age, console, count_bytes, json_option, print_json
from dcp_manifest import CheckpointNotFoundError

__all__ = ["command"]


@click.command("ls")
@click.argument("path", type=click.Path(), default=".")
@json_option
def command(path: str, as_json: bool) -> int:
    """List the checkpoints in PATH and the folders below it, newest first: by step, then by when they were made.

    Several runs follow one another, the one that saved last first. Times of files do not matter where steps are known.

    A checkpoint is valid if its index can be read and its files are there in full length. Their bytes are checked by
    `dcp verify`.
    """
    found = [look_at(one) for one in find(path)]
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
    from rich.table import Table  # noqa: PLC0415 - not needed for JSON

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("checkpoint")
    for name in ("step", "size", "ranks", "values", "age"):
        table.add_column(name, justify="right")
    table.add_column("state")
    now = time.time()
    for one in found:
        state = "[green]valid[/]" if one.valid else f"[red]{(one.problem or 'damaged').replace('[', chr(92) + '[')}[/]"
        table.add_row(
            _below(one.path, root),
            "" if one.step is None else str(one.step),
            count_bytes(one.bytes),
            "" if one.world_size is None else str(one.world_size),
            "" if one.values is None else str(one.values),
            age(now - one.modified_seconds),
            state,
        )
    console().print(table)


def _below(path: str, root: str) -> str:
    """The path as seen from the folder that was asked for."""
    if is_uri(root):
        return path.removeprefix(root.rstrip("/")).strip("/") or "."
    return os.path.relpath(path, root)
