"""Save markers: the file that shows that a save is running, and the time after which it counts as dead.

A marker is named `.dcp-save-<save id>`, followed by `.r<rank>` in a save without a coordinator. The data files of a
save have `.<save id>.` in their names, by which cleanup finds the files of a save.
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
from dcp_manifest.folders.file_names import SAVE_MARKER_PREFIX

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
"""Phase of a save. `starting`: it looks for other saves in the folder. `saving`: it owns the folder. `ended`: it is
over, except for cleanup."""

_NAME = re.compile(re.escape(SAVE_MARKER_PREFIX) + r"([A-Za-z0-9_-]{1,64})(?:\.r([0-9]{1,9}))?")
_SAVE_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


# Markers are published atomically, so a torn one was left by a host that lost power, and no host restarts sooner than #
# this. A shared file system that shows a name before its bytes shows the bytes within this time.
_TORN_SECONDS = 10.0
# Larger than the markers of the largest jobs, which list all files; a larger file is not read.
_MAX_BYTES = 64 << 20
_LAST_NS = 2**62  # the latest time that can be formatted as a date


@dataclass(frozen=True, slots=True)
class Marker:
    """Contents of a save marker: the save, its phase, and the process that runs it."""

    save_id: str
    rank: int | None
    """Rank that wrote the marker, in a save without a coordinator; otherwise None."""
    process: ProcessIdentity | None
    """The process that runs the save; None if the marker cannot be read."""
    phase: Phase
    started_ns: int = 0
    """Wall-clock time of the host when the save started, nanoseconds; for display."""
    replaced: tuple[str, ...] = ()
    """Names of the files that become obsolete when the save is published."""
    torn: bool = False
    """Whether the marker's bytes are incomplete, as after a loss of power."""

    @property
    def name(self) -> str:
        """Name of the marker's file."""
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
        """Parse a marker; if its bytes are damaged, only the save id and rank are known, from the file name `name`."""
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
    """A save marker found in a store, and its entry in the folder's listing."""

    marker: Marker
    entry: Entry

    def is_dead(self, *, now: float, stale_after_seconds: float) -> bool:
        """Whether the marker's save counts as dead: it has ended, its process is gone, or its marker is stale.

        A modification time far in the future also counts as stale: a live save would have corrected it at its next
        renewal, whatever happened to the clock.

        Args:
            now: Current time on the storage's clock, seconds.
            stale_after_seconds: Time without renewal after which a save counts as dead, if its process cannot be
                checked.
        """
        age_seconds = abs(now - self.entry.mtime)
        if self.marker.phase == "ended" or age_seconds > stale_after_seconds:
            return True
        if self.marker.torn and age_seconds > _TORN_SECONDS:
            return True
        return self.marker.process is not None and is_gone(self.marker.process)

    def describe(self, now: float) -> str:
        """Return a description of the save for messages: its process, its start, and the last renewal of its marker.

        Args:
            now: Current time on the storage's clock, seconds.
        """
        process = self.marker.process
        who = f"process {process.pid} on {process.host!r}" if process else "an unknown process"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.marker.started_ns / 1e9))
        seen = max(0.0, now - self.entry.mtime)
        return f"save {self.marker.save_id} of {who}, started {started} UTC, last seen {seen:.0f} s ago"


def marker_name(save_id: str, rank: int | None) -> str:
    """Return the file name of a save's marker; `rank` is its rank in a save without a coordinator, otherwise None."""
    name = f"{SAVE_MARKER_PREFIX}{save_id}"
    return name if rank is None else f"{name}.r{rank}"


def check_save_id(save_id: str) -> str:
    """Return `save_id` unchanged. Raises ValueError if it cannot be part of a file name."""
    if not _SAVE_ID.fullmatch(save_id):
        raise ValueError(f"save id {save_id!r} must be 1 to 64 letters, digits, '_' or '-'")
    return save_id


def belongs_to(name: str, save_id: str) -> bool:
    """Whether a file belongs to the save with the id `save_id`, according to the file's name."""
    return f".{save_id}." in name


def is_marker(name: str) -> bool:
    """Whether a file is a save marker, according to its name."""
    return _NAME.fullmatch(name) is not None


def is_marker_temporary(name: str) -> bool:
    """Whether a file is the temporary file of a save marker, according to its name."""
    found = temporary_of(name)
    return found is not None and is_marker(found[0])


def find_markers(store: Store, entries: list[Entry]) -> list[FoundMarker]:
    """Read the save markers among the entries of a store. Markers removed by other processes meanwhile are left out."""
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
            data = b"null"  # a link, or not a file: only its name is used
        found.append(FoundMarker(Marker.from_bytes(entry.name, data), entry))
    return found
