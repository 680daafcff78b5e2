"""Summaries of the checkpoints under a folder without reading their data: for `dcp ls` and `dcp prune`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_inspect.places import existing_folder, is_uri
from dcp_inspect.unfinished import unfinished_save
from dcp_io import LocalStore, find_checkpoints, open_store, root_at
from dcp_manifest import (
    METADATA_NAME,
    CheckpointIndex,
    DcpError,
    FoundCheckpoint,
    LocalFolder,
    checkpoints_below,
    file_sizes,
    index_of,
    needed_bytes,
    rank_of_data_file,
    without_end_slash,
)

__all__ = ["Listed", "find", "look_at"]


@dataclass(frozen=True, slots=True)
class Listed:
    """Summary of one checkpoint."""

    path: str
    step: int | None
    """Step from the folder's name or the manager's note."""
    bytes: int
    """Size of the index and the data files."""
    values: int | None
    world_size: int | None
    modified_seconds: float
    valid: bool
    """Whether the index is sound and the files exist and are long enough; `dcp verify` checks their contents."""
    problem: str | None
    writer: str | None
    created_ns: int = 0
    """Start time of the save, from the index; 0 if unknown."""
    unfinished: bool = False
    """Whether the save that wrote the files has published no index: it is running, or it did not finish."""


def find(path: str, *, unfinished: bool = False) -> list[FoundCheckpoint[Any]]:
    """Return the checkpoints in a folder or URI and below, newest first; on request, unfinished saves as well.

    Of a file that describes a root of several places, such as `run.tiers.toml`, those in all places.

    Raises:
        CheckpointNotFoundError: There is no such folder.
    """
    described = root_at(path)
    if described is not None:
        return find_checkpoints(described, unfinished=unfinished)
    # Folders need none of the stores' engines.
    root: Any = open_store(path) if is_uri(path) else LocalFolder(existing_folder(path))
    return checkpoints_below(root, unfinished=unfinished)


def look_at(found: FoundCheckpoint[Any]) -> Listed:
    """Summarise a checkpoint without reading its data."""
    store = found.store
    path, step, modified = without_end_slash(store.url), found.step, found.modified_seconds
    if found.unfinished:
        return _unfinished(found, path)
    try:
        index = index_of(store)
        needed = needed_bytes(index)
        sizes = file_sizes(store, {METADATA_NAME: 0, **needed})
    except (DcpError, OSError) as error:
        text = " ".join(str(error).split()).removeprefix(f"{store.url}: ")
        return Listed(path, step, _bytes_in(store), None, None, modified, False, text, None)
    problem = found.put_aside or _first_problem(needed, sizes)
    info = index.info
    return Listed(
        path=path,
        step=step,
        bytes=sum(size or 0 for size in sizes.values()),
        values=len(index.tensor_names) + len(index.object_names) + len(index.alias_names),
        world_size=info.world_size if info else _world_size(index),
        modified_seconds=modified,
        valid=problem is None,
        problem=problem,
        writer=info.writer if info else "torch.distributed.checkpoint",
        created_ns=info.created_ns if info else 0,
    )


def _bytes_in(folder: Any) -> int:
    """Return the size of the files in a folder whose index cannot be read; 0 if the storage fails."""
    try:
        return sum(entry.bytes for entry in folder.list())
    except (DcpError, OSError):
        return 0


def _unfinished(found: FoundCheckpoint[Any], path: str) -> Listed:
    """Summarise the files of a save without an index."""
    store = open_store(path) if is_uri(path) else LocalStore(path)
    size = sum(entry.bytes for entry in store.list())
    problem = unfinished_save(store).summary
    return Listed(path, found.step, size, None, None, found.modified_seconds, False, problem, None, unfinished=True)


def _first_problem(needed: Mapping[str, int], sizes: Mapping[str, int | None]) -> str | None:
    """Return the first problem of the data files; None if there is none."""
    for name, wanted in needed.items():
        size = sizes[name]
        if size is None:
            return f"{name} is missing"
        if size < wanted:
            return f"{name} has {size:,} of {wanted:,} bytes"
    return None


def _world_size(index: CheckpointIndex) -> int | None:
    """Return the world size of a checkpoint that stock saved, from its file names."""
    ranks = [rank for name in index.files if (rank := rank_of_data_file(name)) is not None]
    return max(ranks) + 1 if ranks else None
