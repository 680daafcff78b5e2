"""Sets of safetensors files in a folder: the stamp of a save in its files, and the choice of the current set.

Not every folder of safetensors files has an index. So each file that this project writes has a stamp: the id of its
save, the number of files of the save, and the save's generation. Of all complete sets, the set with the highest
generation is used. A new set therefore replaces the old one at once, when its last file gets its name.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_format.content.temporary_files import begins_as_written
from dcp_format.safetensors.safetensors_header import Header, read_header
from dcp_io import LocalStore, Store

__all__ = [
    "FILES", "GENERATION", "SAVE_ID", "SUFFIX",
    "Stamp", "chosen_set", "fresh_name", "headers_of", "is_writers_file", "is_writers_name", "one_save",
    "save_id_of",
]  # fmt: skip

SUFFIX = ".safetensors"
SAVE_ID = "DCP_SAVE_ID"
"""Key in a file's metadata for the id of the save, which is equal in all files of one save."""
FILES = "DCP_FILE_COUNT"
"""Key in a file's metadata for the number of files of the save, by which an incomplete set is recognised."""
GENERATION = "DCP_GENERATION"
"""Key in a file's metadata for the generation of the save: a number that is higher than in the set it replaces."""
# What writers of whole models, ours among them, call their files.
_WRITTEN = re.compile(r"(shard-\d{5}-)?model(-\d{5}-of-\d{5})?(-[0-9a-f]{8})?(-part-\d+)?\.safetensors")
_TAG_LETTERS = 8


def is_writers_name(name: str) -> bool:
    """Whether a file name is one that this project or Hugging Face libraries give to files of a model."""
    return _WRITTEN.fullmatch(name) is not None


def fresh_name(name: str, present: Collection[str], save_id: str) -> str:
    """Return `name`, or a variant of it if the folder has a file `name`, which stays until the new set is complete.

    Args:
        name: Wanted name of the new file.
        present: Names of the files in the folder.
        save_id: Id of the save; the variant contains some of its letters.
    """
    return name if name not in present else f"{name.removesuffix(SUFFIX)}-{save_id[:_TAG_LETTERS]}{SUFFIX}"


class Stamp:
    """The stamp that a save writes into the metadata of each of its files.

    Args:
        save_id: Id of the save.
        files: Number of files of the save.
        generation: Number of the save, higher than that of the files that it replaces.
    """

    def __init__(self, save_id: str, files: int, generation: int) -> None:
        self.save_id = save_id
        self.metadata: Mapping[str, str] = {SAVE_ID: save_id, FILES: str(files), GENERATION: str(generation)}

    @classmethod
    def next(cls, folder: Path, save_id: str, files: int) -> Stamp:
        """Return the stamp of a new save of `files` files that replaces the current set in a folder."""
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
    """Return the id of the save that made a file; None if its stamp is missing or damaged."""
    try:
        return headers_of(LocalStore(folder), [name])[name].metadata.get(SAVE_ID)
    except DcpError:
        return None


def is_writers_file(store: LocalStore, name: str, size: int) -> bool:
    """Whether a save of a model wrote a file: by its name (see `is_writers_name`) and first bytes, or by its stamp.

    Args:
        store: Store of the folder.
        name: Name of the file.
        size: Size of the file in bytes, from the listing of the folder.
    """
    if is_writers_name(name):
        return begins_as_written(store, name, size)
    return save_id_of(Path(store.path), name) is not None


def headers_of(store: Store, names: Iterable[str]) -> dict[str, Header]:
    """Return file name → header. Raises the errors of `read_header`, and CheckpointNotFoundError for a missing file."""
    found = {}
    for name in names:
        with contextlib.closing(store.open(name)) as source:
            found[name] = read_header(source, file=name)
    return found


def chosen_set(headers: Mapping[str, Header], folder: str) -> dict[str, Header]:
    """Return the current files of a folder without an index: the newest complete set, and all files without a stamp.

    Raises:
        CheckpointNotFoundError: There are files of saves, but no save has all of its files.
        CorruptCheckpointError: Two complete sets have the same generation.
    """
    sets = _sets(headers)
    if len(sets) == 1 and not any(_number(headers[name], FILES) for names in sets.values() for name in names):
        return dict(headers)
    complete = {save_id: names for save_id, names in sets.items() if _is_complete(headers, names)}
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
    """Return the id of the save that made the files; None if they have no stamp.

    Args:
        headers: File name → header.
        folder: Path or URI of the folder, for the error message.

    Raises:
        CorruptCheckpointError: Several saves made the files.
    """
    sets = _sets(headers)
    if len(sets) > 1:
        raise _two_saves([*sets.values()], folder)
    return next(iter(sets), None)


def _sets(headers: Mapping[str, Header]) -> dict[str | None, list[str]]:
    """Group files by save id; files without an id whose names are not those of whole models are left out."""
    found: dict[str | None, list[str]] = defaultdict(list)
    for file, header in headers.items():
        save_id = header.metadata.get(SAVE_ID)
        if save_id is not None or is_writers_name(file):
            found[save_id].append(file)
    return dict(found)


def _is_complete(headers: Mapping[str, Header], names: list[str]) -> bool:
    """Whether all files of a set are present, if their stamps give the number of files."""
    return len(names) >= _number(headers[names[0]], FILES)


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
