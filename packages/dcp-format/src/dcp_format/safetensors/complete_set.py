"""Sets of safetensors files in a folder: the stamp of a save in its files, and the choice of the current set.

Without an index, the complete set with the highest generation is the current one, so a new set replaces the old one
when its last file gets its name.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_format.content.new_file import begins_as_written
from dcp_format.safetensors.safetensors_header import Header, read_header
from dcp_io import LocalStore, Store

SUFFIX = ".safetensors"
SAVE_ID = "DCP_SAVE_ID"
"""Metadata key: id of the save, equal in all of its files."""
FILES = "DCP_FILE_COUNT"
"""Metadata key: number of files of the save, which reveals an incomplete set."""
GENERATION = "DCP_GENERATION"
"""Metadata key: a number that is higher than in the set that the save replaces."""
# What writers of whole models, ours among them, call their files.
_WRITTEN = re.compile(r"(shard-\d{5}-)?model(-\d{5}-of-\d{5})?(-[0-9a-f]{8})?(-part-\d+)?\.safetensors")
_TAG_LETTERS = 8


def is_writers_name(name: str) -> bool:
    """Whether this project or Hugging Face libraries give such a name to files of a model."""
    return _WRITTEN.fullmatch(name) is not None


def fresh_name(name: str, present: Collection[str], save_id: str) -> str:
    """Return `name`, or a variant of it if the folder has such a file, which stays until the new set is complete."""
    return name if name not in present else f"{name.removesuffix(SUFFIX)}-{save_id[:_TAG_LETTERS]}{SUFFIX}"


class Stamp:
    """The stamp that a save writes into the metadata of its files."""

    def __init__(self, save_id: str, files: int, generation: int) -> None:
        self.save_id = save_id
        self.metadata: Mapping[str, str] = {SAVE_ID: save_id, FILES: str(files), GENERATION: str(generation)}

    @classmethod
    def next(cls, folder: Path, save_id: str, files: int) -> Stamp:
        """Return the stamp of a save that replaces the current set in a folder."""
        store = LocalStore(folder)
        names = sorted(path.name for path in folder.glob(f"*{SUFFIX}") if is_writers_name(path.name))
        highest = 0
        for name in names:
            with contextlib.suppress(DcpError):  # a damaged file is replaced as well as any other
                header = headers_of(store, [name])[name]
                if header.metadata.get(SAVE_ID) != save_id:
                    highest = max(highest, _number(header, GENERATION))
        return cls(save_id, files, highest + 1)


def save_id_of(folder: Path, name: str) -> str | None:
    """Return the id of the save that wrote a file; None if its stamp is missing or damaged."""
    try:
        return headers_of(LocalStore(folder), [name])[name].metadata.get(SAVE_ID)
    except DcpError:
        return None


def is_writers_file(store: LocalStore, name: str, size: int) -> bool:
    """Whether a save of a model wrote a file: by its name and first bytes, or by its stamp."""
    if is_writers_name(name):
        return begins_as_written(store, name, size)
    return save_id_of(Path(store.path), name) is not None


def headers_of(store: Store, names: Iterable[str]) -> dict[str, Header]:
    """Return file name → header. Raises CheckpointNotFoundError for a missing file."""
    found = {}
    for name in names:
        with contextlib.closing(store.open(name)) as source:
            found[name] = read_header(source, file=name)
    return found


def chosen_set(headers: Mapping[str, Header], folder: str) -> dict[str, Header]:
    """Return the current files of a folder without an index: the newest complete set, and all files without a stamp.

    Raises CheckpointNotFoundError without a complete set, CorruptCheckpointError for two sets of one generation.
    """
    sets = _sets(headers)
    if len(sets) == 1 and not any(_number(headers[name], FILES) for names in sets.values() for name in names):
        return dict(headers)
    complete = {save_id: names for save_id, names in sets.items() if len(names) >= _number(headers[names[0]], FILES)}
    if sets and not complete:
        first = next(iter(sets.values()))
        raise CheckpointNotFoundError(
            f"the save that made {first[0]} in {folder} was interrupted: {len(first)} of its "
            f"{_number(headers[first[0]], FILES)} files are there; save again"
        )
    newest = max((_generation(headers, names) for names in complete.values()), default=0)
    counting = {save_id: names for save_id, names in complete.items() if _generation(headers, names) == newest}
    if len(counting) > 1:
        raise _two_saves([*counting.values()], folder)
    dropped = {name for save_id, names in sets.items() if save_id not in counting for name in names}
    return {name: header for name, header in headers.items() if name not in dropped}


def one_save(headers: Mapping[str, Header], folder: str) -> str | None:
    """Return the id of the save that wrote the files; None without a stamp.

    Raises CorruptCheckpointError if several saves wrote them.
    """
    sets = _sets(headers)
    if len(sets) > 1:
        raise _two_saves([*sets.values()], folder)
    return next(iter(sets), None)


def _sets(headers: Mapping[str, Header]) -> dict[str | None, list[str]]:
    """Group files by save id, which is None for names of whole models without a stamp."""
    found: dict[str | None, list[str]] = defaultdict(list)
    for file, header in headers.items():
        save_id = header.metadata.get(SAVE_ID)
        if save_id is not None or is_writers_name(file):
            found[save_id].append(file)
    return dict(found)


def _generation(headers: Mapping[str, Header], names: list[str]) -> int:
    return max(_number(headers[name], GENERATION) for name in names)


def _number(header: Header, key: str) -> int:
    text = header.metadata.get(key, "0")
    return int(text) if text.isascii() and text.isdigit() else 0


def _two_saves(sets: list[list[str]], folder: str) -> CorruptCheckpointError:
    first, second = sets[0][0], sets[1][0]
    return CorruptCheckpointError(
        f"{first} and {second} of {folder} are of two saves: one of them was interrupted while it replaced the "
        "other; save again, or restore the files from a copy",
        file=second,
    )


T = TypeVar("T")


def split_by_size(entries: Iterable[T], max_file_bytes: int, nbytes: Callable[[T], int]) -> list[list[T]]:
    """Split tensors, in order, into groups of at most `max_file_bytes` bytes; a larger tensor gets its own group."""
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes} must be at least 1")
    groups: list[list[T]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + nbytes(entry) > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += nbytes(entry)
    return groups
