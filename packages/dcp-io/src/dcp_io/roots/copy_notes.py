"""`CopyNote`: a file beside a host's part of a checkpoint, which says what is a copy of another host's part.

A checkpoint is protected if each host's part is on another host, too. The note has a copy's name before the copy is
complete: so nothing takes a copy for a part of this host.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dcp_io.roots.catalogue import StepFolder
from dcp_io.roots.host_ids import hosts_of_job
from dcp_io.roots.records import CheckpointRecord
from dcp_io.saves.current_checkpoint import read_current
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError

__all__ = ["CopyNote", "newest_protected", "read_copy_note", "write_copy_note"]

NAME = ".dcp-copies.json"


@dataclass(frozen=True, slots=True)
class CopyNote:
    """What one host has of other hosts' parts of a checkpoint."""

    save_id: str = ""
    """Id of the save."""
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Id of the host that has written them → names of the data files of which this host has, or is getting, copies."""
    hosts: tuple[str, ...] = ()
    """Ids of all hosts that have parts of it."""
    protected: bool = False
    """Whether each host's part is on another host, too."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all copies."""
        return frozenset(name for names in self.copies.values() for name in names)


def write_copy_note(store: Store, note: CopyNote) -> None:
    """Write the note beside the checkpoint in the folder `store`. Raises OSError."""
    copies = {host: list(names) for host, names in note.copies.items()}
    values = {"save_id": note.save_id, "protected": note.protected, "copies": copies, "hosts": [*note.hosts]}
    store.publish(NAME, json.dumps(values).encode(), sync=False)


def read_copy_note(store: Store, entries: Iterable[Entry] | None = None) -> CopyNote:
    """Return the note in a checkpoint's folder; one without copies if there is none.

    `protected` is about what is there now: False if the note is of an earlier save of the step, or if the job that runs
    now, or ran last, has lost one of the hosts.

    Args:
        store: The checkpoint's folder.
        entries: Listing of the folder, if the caller has a fresh one.

    Raises:
        OSError: The storage failed.
    """
    if entries is not None and not any(entry.name == NAME for entry in entries):
        return CopyNote()
    try:
        values = json.loads(store.read(NAME))
        save_id = str(values["save_id"])
        copies = {str(host): tuple(map(str, names)) for host, names in values["copies"].items()}
        hosts = tuple(map(str, values["hosts"]))
        protected = values["protected"] is True and _has_all(store, hosts) and read_current(store).save_id == save_id
        return CopyNote(save_id, copies, hosts, protected)
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return CopyNote()


def _has_all(store: Store, hosts: Collection[str]) -> bool:
    """Whether the job has all the hosts, as far as it is known in this host's place."""
    present = hosts_of_job(store.parent()) if isinstance(store, HostStore) else None
    return present is None or present.issuperset(hosts)


def newest_protected(folders: Collection[StepFolder], records: Iterable[CheckpointRecord]) -> int | None:
    """Return the step that was made last of those that are protected; None if none is.

    Args:
        folders: Listing of the checkpoints' folders.
        records: Records of undamaged checkpoints, in the order of their creation.

    Raises:
        OSError: The storage failed.
    """
    by_step = {folder.step: folder for folder in folders if NAME in folder.names}
    for record in reversed([*records]):
        folder = by_step.get(record.step)
        if folder is not None and read_copy_note(folder.store, folder.entries).protected:
            return record.step
    return None
