"""Save markers: the file that shows that a save is running, and how long it is believed.

A marker is named `.dcp-save-<save id>`, with `.r<rank>` behind it in a save without a coordinator. Files of a save
carry `.<save id>.` in their names, so that cleanup can tell whose they are.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from typing import Literal, get_args

from dcp_io.saves.marker_owner import ProcessIdentity, is_gone
from dcp_io.saves.own_files import temporary_of
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError, DcpError

__all__ = [
    "FoundMarker",
    "Marker",
    "Phase",
    "belongs_to",
    "check_save_id",
    "find_markers",
    "is_marker",
    "is_marker_temporary",
    "marker_name",
]

Phase = Literal["starting", "saving", "ended"]
"""`starting`: other saves are still being looked for. `saving`: it owns the folder. `ended`: nothing runs any more,
only cleanup is left to do."""

_PREFIX = ".dcp-save-"
_NAME = re.compile(r"\.dcp-save-([A-Za-z0-9_-]{1,64})(?:\.r([0-9]{1,9}))?")
_SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


# Markers appear under their names complete; one that does not is what a host that lost its power left, and no host is
# up again sooner. Where a shared file system shows a name before its bytes, they follow within this time.
_TORN_SECONDS = 10.0
# Above what lists the files of the largest jobs; more is not read.
_MAX_BYTES = 64 << 20
_LAST_NS = 2**62  # what can be shown as a date


@dataclass(frozen=True, slots=True)
class Marker:
    """Contents of a save marker."""

    save_id: str
    rank: int | None
    """The rank, in a save without a coordinator."""
    process: ProcessIdentity | None
    """None if the marker cannot be read."""
    phase: Phase
    started_ns: int = 0
    """Wall-clock time of the host, for display."""
    replaced: tuple[str, ...] = ()
    """Files that are obsolete once this save is the published one."""
    torn: bool = False
    """Whether the bytes are torn: a loss of power took a part of them."""

    @property
    def name(self) -> str:
        """The marker's own name."""
        return marker_name(self.save_id, self.rank)

    def to_bytes(self) -> bytes:
        """Return the marker as JSON."""
        values = {
            "save_id": self.save_id,
            "rank": self.rank,
            "process": self.process.to_dict() if self.process else None,
            "phase": self.phase,
            "started_ns": self.started_ns,
            "replaced": self.replaced,
        }
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> Marker:
        """Return the marker of that name; without contents if the bytes are damaged."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r} is not the name of a save marker")
        save_id, rank = found[1], int(found[2]) if found[2] else None
        try:
            values = json.loads(data)
            process = ProcessIdentity.from_dict(values["process"])
            phase, started_ns = values["phase"], min(max(0, int(values["started_ns"])), _LAST_NS)
            replaced = tuple(str(file) for file in values["replaced"])
        except (json.JSONDecodeError, UnicodeDecodeError):
            return cls(save_id, rank, None, "saving", torn=True)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return cls(save_id, rank, None, "saving")
        if phase not in get_args(Phase):
            return cls(save_id, rank, None, "saving")
        return cls(save_id, rank, process, phase, started_ns, replaced)


@dataclass(frozen=True, slots=True)
class FoundMarker:
    """A marker found in a store."""

    marker: Marker
    entry: Entry

    def is_dead(self, *, now: float, stale_after_seconds: float) -> bool:
        """Whether its save is certainly over, or has not renewed it for too long.

        A time that far in the future is as good a sign of that as one so long ago: a live save would have replaced it
        by the present one, whatever has happened to the clock.

        Args:
            now: On the storage's clock.
            stale_after_seconds: How long a save may be silent where its process cannot be checked.
        """
        age_seconds = abs(now - self.entry.mtime)
        if self.marker.phase == "ended" or age_seconds > stale_after_seconds:
            return True
        if self.marker.torn and age_seconds > _TORN_SECONDS:
            return True
        return self.marker.process is not None and is_gone(self.marker.process)

    def describe(self, now: float) -> str:
        """Return a description of the save, for messages."""
        process = self.marker.process
        who = f"process {process.pid} on {process.host!r}" if process else "an unknown process"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.marker.started_ns / 1e9))
        seen = max(0.0, now - self.entry.mtime)
        return f"save {self.marker.save_id} of {who}, started {started} UTC, last seen {seen:.0f} s ago"


def marker_name(save_id: str, rank: int | None) -> str:
    """Return the name of the marker of a save, or of one rank of a save without a coordinator."""
    return f"{_PREFIX}{save_id}" if rank is None else f"{_PREFIX}{save_id}.r{rank}"


def check_save_id(save_id: str) -> str:
    """Return `save_id`, if it can be part of file names. Raises ValueError otherwise."""
    if not _SAVE_ID.fullmatch(save_id):
        raise ValueError(f"save id {save_id!r} must be 1 to 64 letters, digits, '_' or '-'")
    return save_id


def belongs_to(name: str, save_id: str) -> bool:
    """Whether a file's name shows that this save made it."""
    return f".{save_id}." in name


def is_marker(name: str) -> bool:
    """Whether a file's name is that of a marker."""
    return _NAME.fullmatch(name) is not None


def is_marker_temporary(name: str) -> bool:
    """Whether a file is a temporary file of a store that publishes a marker."""
    found = temporary_of(name)
    return found is not None and is_marker(found[0])


def find_markers(store: Store, entries: list[Entry]) -> list[FoundMarker]:
    """Return the markers among the store's entries; those that vanish meanwhile are left out."""
    found: list[FoundMarker] = []
    for entry in entries:
        if not _NAME.fullmatch(entry.name):
            continue
        try:
            data = store.read(entry.name) if entry.bytes <= _MAX_BYTES else b"null"
        except CheckpointNotFoundError:
            continue
        except DcpError as error:
            if isinstance(error, OSError):
                raise
            data = b"null"  # a link, or no file: it says nothing but its name
        found.append(FoundMarker(Marker.from_bytes(entry.name, data), entry))
    return found
