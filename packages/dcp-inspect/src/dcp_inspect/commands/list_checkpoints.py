"""`dcp ls`: the checkpoints under a folder, newest first, from their indexes and the sizes of their files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from dcp_inspect.contents import existing_folder, is_uri, open_store
from dcp_inspect.output import age, console, count_bytes, json_option, print_json
from dcp_manifest import (
    CheckpointEntry,
    CheckpointIndex,
    CheckpointNotFoundError,
    DcpError,
    find_checkpoints,
    index_of,
    needed_bytes,
)

if TYPE_CHECKING:
    from dcp_io import FoundCheckpoint

__all__ = ["command"]

_NUMBER = re.compile(r"(?:^|[-_a-zA-Z=])(\d+)$")


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the list."""

    path: str
    step: int | None
    """The number that the folder's name ends with."""
    bytes: int
    values: int | None
    world_size: int | None
    modified_seconds: float
    valid: bool
    """Its index is sound, and its files are there and long enough; `dcp verify` looks into them."""
    problem: str | None
    writer: str | None


@click.command("ls")
@click.argument("path", type=click.Path(), default=".")
@json_option
def command(path: str, as_json: bool) -> int:
    """List the checkpoints in PATH and the folders below it, newest first.

    A checkpoint is valid if its index can be read and its files are there in full length. Their bytes are checked by
    `dcp verify`.
    """
    if is_uri(path):
        from dcp_io import find_checkpoints as stored_checkpoints  # noqa: PLC0415 - folders need none of its engines

        found = [_look_into(entry) for entry in stored_checkpoints(open_store(path))]
        found.sort(key=lambda one: (one.modified_seconds, one.path), reverse=True)
    else:
        found = [look_at(entry) for entry in find_checkpoints(existing_folder(path))]
    if as_json:
        print_json([asdict(one) for one in found])
        return 0
    if not found:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {path} or below: a checkpoint has a file .metadata, which a save writes last"
        )
    _print(found, path)
    return 0


def look_at(entry: CheckpointEntry) -> Listed:
    """What can be said of a checkpoint without reading its data."""

    def size(name: str) -> int | None:
        try:
            return (entry.path / name).stat().st_size
        except OSError:
            return None

    return _listed(str(entry.path), entry.modified_seconds, lambda: index_of(entry.path), size)


def _look_into(entry: FoundCheckpoint) -> Listed:
    """The same of one in a store."""
    from dcp_io import StoreBackend  # noqa: PLC0415

    sizes = {each.name: each.bytes for each in entry.store.list()}
    read = StoreBackend(entry.store).read_index
    return _listed(entry.store.url.rstrip("/"), entry.modified_seconds, read, sizes.get)


def _listed(
    path: str, modified_seconds: float, read_index: Callable[[], CheckpointIndex], size_of: Callable[[str], int | None]
) -> Listed:
    number = _NUMBER.search(path.rpartition("/")[2])
    step = int(number[1]) if number else None
    try:
        index = read_index()
        sizes, problem = _files(index, size_of)
    except (DcpError, OSError) as error:
        text = " ".join(str(error).split())
        return Listed(path, step, 0, None, None, modified_seconds, False, text, None)
    values = len(index.tensor_names) + len(index.object_names) + len(index.alias_names)
    info = index.info
    return Listed(
        path=path,
        step=step,
        bytes=sizes,
        values=values,
        world_size=info.world_size if info else _world_size(index),
        modified_seconds=modified_seconds,
        valid=problem is None,
        problem=problem,
        writer=info.writer if info else "torch.distributed.checkpoint",
    )


def _files(index: CheckpointIndex, size_of: Callable[[str], int | None]) -> tuple[int, str | None]:
    """Bytes of the data files, and what is wrong with them."""
    total, problem = 0, None
    for name, wanted in needed_bytes(index).items():
        size = size_of(name)
        if size is None:
            problem = problem or f"{name} is missing"
            continue
        total += size
        if size < wanted:
            problem = problem or f"{name} has {size} of {wanted} bytes"
    return total, problem


def _world_size(index: CheckpointIndex) -> int | None:
    """Of what stock wrote: as many ranks as its file names tell."""
    ranks = {int(found[1]) for name in index.files if (found := re.match(r"__(\d+)_", name))}
    return max(ranks) + 1 if ranks else None


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
