"""Publishing of an export: final names, then the index, then removal of the files that it replaced.

At each moment the folder holds the old or the new model, whole, because new files take free names, or one file
replaces one file by a rename.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcp_format.export.file_map import ExportedTensor, PlannedFile
from dcp_format.safetensors.complete_set import SUFFIX, fresh_name, is_writers_name
from dcp_format.safetensors.safetensors_index import INDEX_NAME, earlier_files, index_json
from dcp_format.safetensors.safetensors_write import remove_earlier
from dcp_io import LocalStore, Store


@dataclass(frozen=True, slots=True)
class Names:
    """Final names of an export's files."""

    files: Sequence[str]
    indexed: bool
    """False if the only file replaces the only file, or nothing, in one rename."""


def choose_names(folder: Path, wanted: Sequence[str], tag: str, *, always_indexed: bool) -> Names:
    """Return names that an older save's files do not have."""
    present = {path.name for path in folder.glob(f"*{SUFFIX}")}
    if not always_indexed and len(wanted) == 1 and present <= {*wanted}:
        return Names(wanted, indexed=False)
    taken: Collection[str] = earlier_files(folder)
    indexed = always_indexed or len(wanted) > 1 or bool(present) or (folder / INDEX_NAME).exists()
    return Names([fresh_name(name, taken, tag) for name in wanted], indexed)


def publish_files(folder: Path, files: Sequence[PlannedFile], *, indexed: bool) -> None:
    """Rename complete files, write the index if there is one, and remove an older save's files.

    Ranks: the coordinator, after all writes.
    """
    store = LocalStore(folder)
    earlier = earlier_files(folder)
    if not indexed and store.exists(INDEX_NAME):
        # It names the one file that is replaced, which is complete without it.
        store.delete(INDEX_NAME)
        store.sync_folder()
    for file in files:
        os.replace(folder / file.temporary, folder / file.name)
    store.sync_folder()
    if indexed:
        store.publish(INDEX_NAME, _index(files))
    remove_earlier(store, earlier - {file.name for file in files})


def choose_object_names(store: Store, wanted: Sequence[str], tag: str) -> Names:
    """Return names that no object has."""
    present = {entry.name for entry in store.list()}
    earlier = INDEX_NAME in present or any(name.endswith(SUFFIX) for name in present)
    return Names([fresh_name(name, present, tag) for name in wanted], indexed=len(wanted) > 1 or earlier)


def publish_objects(store: Store, files: Sequence[PlannedFile], *, indexed: bool) -> None:
    """Write the index of complete objects if there is one, and remove an older save's objects.

    Ranks: the coordinator, after all uploads.
    """
    if not indexed:
        return
    store.publish(INDEX_NAME, _index(files))
    ours = {file.name for file in files}
    for entry in store.list():
        if is_writers_name(entry.name) and entry.name not in ours:
            store.delete(entry.name)
    store.sync_folder()


def _index(files: Sequence[PlannedFile]) -> bytes:
    return index_json({file.name: [pair for tensor in file.tensors for pair in _sizes(tensor)] for file in files})


def _sizes(tensor: ExportedTensor) -> list[tuple[str, int]]:
    return [(name, tensor.nbytes // len(tensor.stored)) for name, _ in tensor.stored]
