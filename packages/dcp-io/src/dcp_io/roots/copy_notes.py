"""Notes of hosts: their ids, and the copies that they hold.

A note names a copy before the copy is complete, so that a copy is never taken for a part of this host.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from dcp_io.saves.cleanup import read_current
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError

NAME = ".dcp-copies.json"


@dataclass(frozen=True, slots=True)
class CopyNote:
    """One host's copies of other hosts' parts of a checkpoint, as a file next to its own part."""

    save_id: str = ""
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Id of the writing host → its data files that this host has, or is getting."""
    hosts: tuple[str, ...] = ()
    """Hosts with parts of the checkpoint."""
    protected: bool = False
    """Whether each host's part has a copy on another host."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all copies."""
        return frozenset(name for names in self.copies.values() for name in names)

    def write(self, store: Store) -> None:
        """Write the note. Raises OSError."""
        copies = {host: list(names) for host, names in self.copies.items()}
        values = {"save_id": self.save_id, "protected": self.protected, "copies": copies, "hosts": [*self.hosts]}
        store.publish(NAME, json.dumps(values).encode(), sync=False)

    @classmethod
    def read(cls, store: Store, entries: Iterable[Entry] | None = None) -> CopyNote:
        """Return a checkpoint's note; an empty one if there is none. Raises OSError.

        `protected` is False if the note is of an earlier save, or if the current or last job has lost one of the hosts.
        """
        if entries is not None and not any(entry.name == NAME for entry in entries):
            return cls()
        try:
            values = json.loads(store.read(NAME))
        except (CheckpointNotFoundError, ValueError, RecursionError):
            return cls()
        if not isinstance(values, dict):
            return cls()
        # Fields are parsed independently: if a copy's name were lost, the copy would be taken for this host's part.
        save_id, copies, hosts = values.get("save_id"), values.get("copies"), _texts(values.get("hosts"))
        named = {host: _texts(names) or () for host, names in copies.items()} if isinstance(copies, dict) else {}
        protected = (
            values.get("protected") is True
            and isinstance(save_id, str)
            and hosts is not None
            and _has_all(store, hosts)
            and read_current(store).save_id == save_id
        )
        return cls(save_id if isinstance(save_id, str) else "", named, hosts or (), protected)


def _texts(values: Any) -> tuple[str, ...] | None:
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else None


def _has_all(store: Store, hosts: Collection[str]) -> bool:
    present = JobHosts(store.parent()).noted() if isinstance(store, HostStore) else None
    return present is None or present.issuperset(hosts)


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One rank's view of a checkpoint to copy."""

    store: HostStore
    leaders: Sequence[int]
    """For each rank, the rank that manages its host's store."""
    is_cancelled: Callable[[], bool]
    """Called repeatedly; returns whether to stop."""
    peers: Any = None
    """Options of connections (`dcp_ranks.PeerOptions`), or None."""


@dataclass(frozen=True, slots=True)
class HostsCopied:
    """Outcome of a copy, the same on all ranks but for the bytes."""

    reason: str | None = None
    """Why the checkpoint is not protected, as a clause."""
    bytes_sent: int = 0
    """Bytes that this rank has sent."""

    @property
    def protected(self) -> bool:
        """Whether each host's part is on another host."""
        return self.reason is None


@runtime_checkable
class HostCopies(Protocol):
    """Protocol of a way to copy each host's part to other hosts."""

    def copy(self, coordinator: Any, request: CopyRequest) -> HostsCopied:
        """Copy each host's part of a checkpoint, and write the `CopyNote`.

        The caller closes `coordinator` (`dcp_ranks.Coordinator`). A lost or failed rank makes the copy fail with any
        Exception.

        Ranks: every rank; collective, in its own thread.
        """
        ...


HOST_FILE = ".dcp-host"
HOSTS_FILE = ".dcp-hosts.json"
_ID = re.compile("[0-9a-f]{16}")


class JobHosts:
    """Ids of hosts, as files in each host's place of a run."""

    def __init__(self, place: Store) -> None:
        self._place = place

    def own_id(self) -> str:
        """Return or create this host's id, 16 hexadecimal digits. Raises OSError."""
        with contextlib.suppress(CheckpointNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            found = str(json.loads(self._place.read(HOST_FILE))["host"])
            if _ID.fullmatch(found):  # it becomes part of file names, and a number
                return found
        made = secrets.token_hex(8)
        self._place.make()
        self._place.publish(HOST_FILE, json.dumps({"host": made}).encode())
        return made

    def note(self, ids: Iterable[str]) -> None:
        """Write the ids of the current job's hosts. Raises OSError."""
        self._place.publish(HOSTS_FILE, json.dumps({"hosts": sorted(ids)}).encode(), sync=False)

    def noted(self) -> frozenset[str] | None:
        """Return the ids that the last job noted; None without a note."""
        try:
            return frozenset(map(str, json.loads(self._place.read(HOSTS_FILE))["hosts"]))
        except (CheckpointNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None
