"""Files of saves, and save markers, which show that a save is running, and when it counts as dead.

Names, markers and indexes may be forged. So a file is removed only if it is empty or begins like a save's file: data
files with a mark that names a save, indexes as a pickle, markers and notes as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import threading
import time
from dataclasses import dataclass
from typing import Literal, get_args

from dcp_base.errors import DcpError
from dcp_io.stores.store import TEMPORARY_SUFFIX, Entry, Store
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.folder import DATA_SUFFIX, SAVE_MARKER_PREFIX, is_index_name

MARK_BYTES = 64
_MAGIC = b"\x93DCPDAT\n"
_ID = r"[A-Za-z0-9_-]{1,64}"
_MARKED = re.compile(rb"[A-Za-z0-9_-]+\0*")
_DATA = re.compile(rf"[^/\x00]*?[0-9]+(?:\.({_ID}))?" + re.escape(DATA_SUFFIX))
_RANK_INDEX = re.compile(rf"__[0-9]{{1,9}}\.({_ID})\.metadata")
_MARKER = re.compile(re.escape(SAVE_MARKER_PREFIX) + rf"({_ID})(?:\.r([0-9]{{1,9}}))?")
DIGESTS = re.compile(rf"__[0-9]{{1,9}}_digests0\.{_ID}" + re.escape(DATA_SUFFIX))
"""Names of files with digests for the next save; see `dcp_io.writing.deduplication`."""
_NOTE = re.compile(
    r"\.dcp-(?:reading-[0-9a-f]{1,32}|removing|note\.json|note-next\.json|quarantined\.json|copies\.json|promoting(?:-[0-9a-f]{1,32})?\.json"
    r"|(?:promoted|forgone|refused)-[0-9a-f]{1,32}-[0-9a-f]{1,32}\.json)"
)
_TEMPORARY = re.compile(rf"\.(.+)\.((?:{_ID})?)\.[0-9a-f]{{1,32}}" + re.escape(TEMPORARY_SUFFIX))
_ARCHIVE, _ZSTD, _PICKLE, _JSON = b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\x80", b"{"
# After a loss of power, the first sector of a file, or more, may never have reached the disk.
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class OwnName:
    """Parsed name of a save's or manager's file."""

    kind: Literal["data", "index", "note"]
    """`note` includes all small JSON files."""
    save_id: str | None = None
    temporary: bool = False


def data_mark(save_id: str) -> bytes:
    """Return the first bytes of a save's data files."""
    return (_MAGIC + save_id.encode())[:MARK_BYTES].ljust(MARK_BYTES, b"\0")


def mark_bytes(head: bytes | memoryview) -> int:
    """Return the size of the mark with which a data file begins; 0 without one. A link has the mark of another save."""
    mark = bytes(head[:MARK_BYTES])
    return MARK_BYTES if mark.startswith(_MAGIC) and _MARKED.fullmatch(mark[len(_MAGIC) :]) else 0


def own_name(name: str) -> OwnName | None:
    """Parse the name of a save's file; None for others."""
    base = name.rpartition("/")[2]
    if temporary := temporary_of(base):
        becomes = own_name(temporary[0])
        return becomes and OwnName(becomes.kind, temporary[1] or None, temporary=True)
    if found := _DATA.fullmatch(base):
        return OwnName("data", found[1])
    if is_index_name(base):
        rank_index = _RANK_INDEX.fullmatch(base)
        return OwnName("index", rank_index[1] if rank_index else None)
    if found := _MARKER.fullmatch(base):
        return OwnName("note", found[1])
    return OwnName("note") if _NOTE.fullmatch(base) else None


def temporary_of(name: str) -> tuple[str, str] | None:
    """Split the name of a temporary object of `Store.publish` into final name and tag; None for other names."""
    found = _TEMPORARY.fullmatch(name)
    return (found[1], found[2]) if found else None


def is_own_file(store: Store, name: str, size: int) -> bool:
    """Whether a save or the checkpoint manager made a file, by its name and contents. Raises OSError.

    Also True for a save's file that a crash left empty, truncated, or with zeros as its first bytes.
    """
    own = own_name(name)
    if own is None:
        return False
    head = memoryview(bytearray(min(size, _HEAD_BYTES)))
    try:
        with contextlib.closing(store.open(name)) as source:
            if head:
                source.read_into(0, [head])
    except DcpError as error:
        if isinstance(error, OSError):
            raise
        return False  # a link out of the folder, not a file, or shorter by now: not a leftover of a save
    return _begins_as(own, bytes(head))


def _begins_as(own: OwnName, head: bytes) -> bool:
    if not any(head):
        return True
    if own.kind != "data":
        return head.startswith(_PICKLE if own.kind == "index" else _JSON)
    if head.startswith(_MAGIC[: len(head)]):
        mark = data_mark(own.save_id) if own.save_id is not None else b""
        return (bool(mark) and head[:MARK_BYTES] == mark[: len(head)]) or mark_bytes(head) > 0
    # Files without a mark (of other writers and of early versions) are recognised by their format.
    return head[:MARK_BYTES].lstrip(b"\0").startswith((_ARCHIVE, _ZSTD))


Phase = Literal["starting", "saving", "ended"]
"""`starting`: looks for other saves. `saving`: owns the folder. `ended`: only cleanup remains."""

# Publishing is atomic, so only a host that lost power leaves a torn marker, and no host restarts sooner than this. A
# shared file system that shows a name before its bytes shows the bytes within this time.
_TORN_SECONDS = 10.0
# Larger than the markers of the largest jobs, which list all files; a larger file is not read.
_MAX_BYTES = 64 << 20
LAST_NS = 2**62  # the latest time that can be formatted as a date


@dataclass(frozen=True, slots=True)
class Marker:
    """Contents of a save marker."""

    save_id: str
    rank: int | None
    """Only in a save without a coordinator."""
    process: ProcessIdentity | None
    phase: Phase
    started_ns: int = 0
    """On the host's clock, for display."""
    replaced: tuple[str, ...] = ()
    torn: bool = False
    """Whether bytes are missing."""

    @property
    def name(self) -> str:
        """File name."""
        return marker_name(self.save_id, self.rank)

    def to_bytes(self) -> bytes:
        """Return JSON."""
        values = {
            "save_id": self.save_id,
            "rank": self.rank,
            "process": self.process.to_dict() if self.process else None,
            "phase": self.phase,
            "started_ns": self.started_ns,
            "replaced": self.replaced,
        }
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> Marker:
        """Parse a marker; if damaged, only the name's save id and rank."""
        found = _MARKER.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r} is not the name of a save marker")
        save_id, rank = found[1], int(found[2]) if found[2] else None
        try:
            values = json.loads(data)
            process = ProcessIdentity.from_dict(values["process"])
            phase, started_ns = values["phase"], min(max(0, int(values["started_ns"])), LAST_NS)
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
    """A save marker, and its entry in the listing."""

    marker: Marker
    entry: Entry

    def is_dead(self, *, now: float, stale_after_seconds: float) -> bool:
        """Whether the save has ended, its process is gone, or its marker is old or dated far ahead.

        `now` is on the storage's clock.
        """
        age_seconds = abs(now - self.entry.mtime)
        if self.marker.phase == "ended" or age_seconds > stale_after_seconds:
            return True
        if self.marker.torn and age_seconds > _TORN_SECONDS:
            return True
        return self.marker.process is not None and self.marker.process.is_gone()

    def describe(self, now: float) -> str:
        """Describe the save for messages."""
        process = self.marker.process
        who = f"process {process.pid} on {process.host!r}" if process else "an unknown process"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self.marker.started_ns / 1e9))
        seen = max(0.0, now - self.entry.mtime)
        return f"save {self.marker.save_id} of {who}, started {started} UTC, last seen {seen:.0f} s ago"


def marker_name(save_id: str, rank: int | None) -> str:
    """Return a marker's file name."""
    name = f"{SAVE_MARKER_PREFIX}{save_id}"
    return name if rank is None else f"{name}.r{rank}"


def check_save_id(save_id: str) -> str:
    """Raise ValueError for an id that no file name may contain."""
    if not re.fullmatch(_ID, save_id):
        raise ValueError(f"save id {save_id!r} must be 1 to 64 letters, digits, '_' or '-'")
    return save_id


def belongs_to(name: str, save_id: str) -> bool:
    """Whether a file name belongs to the save."""
    return f".{save_id}." in name


def is_marker_temporary(name: str) -> bool:
    """Whether a file name is a temporary marker's."""
    found = temporary_of(name)
    return found is not None and _MARKER.fullmatch(found[0]) is not None


def find_markers(store: Store, entries: list[Entry]) -> list[FoundMarker]:
    """Read a store's markers, except those that disappear."""
    found: list[FoundMarker] = []
    for entry in entries:
        if not _MARKER.fullmatch(entry.name):
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


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identity of a process, other than that of a later process with the same pid."""

    host: str
    boot_id: str
    pid_namespace: str
    """Like `boot_id`, empty if unknown."""
    pid: int
    start_ticks: int
    """Start time in the system's ticks since boot; 0 if unknown."""

    def to_dict(self) -> dict[str, str | int]:
        """Return plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> ProcessIdentity:
        """Parse `to_dict`. Raises KeyError, TypeError or ValueError for other dicts."""
        texts = [values["host"], values["boot_id"], values["pid_namespace"]]
        numbers = [values["pid"], values["start_ticks"]]
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(n, int) for n in numbers):
            raise TypeError("not a process identity")
        host, boot_id, namespace = map(str, texts)
        return cls(host, boot_id, namespace, int(str(numbers[0])), int(str(numbers[1])))

    def is_gone(self) -> bool:
        """Whether the process has certainly ended. False if unknown, as for another host, boot or pid namespace."""
        if not can_be_checked(self):
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        state, threads, ticks = _status(self.pid)
        if state in ("Z", "X") and threads <= 1:  # if it has more threads, one of them may still finish a write
            return True
        return bool(ticks and self.start_ticks and ticks != self.start_ticks)


def this_process() -> ProcessIdentity:
    """Return this process's identity."""
    return _identity(os.getpid())


def can_be_checked(process: ProcessIdentity) -> bool:
    """Whether host, boot and pid namespace are this process's."""
    here = this_process()
    same = (process.host, process.boot_id, process.pid_namespace) == (here.host, here.boot_id, here.pid_namespace)
    return same and process.pid > 0


@functools.lru_cache(maxsize=1)
def _identity(pid: int) -> ProcessIdentity:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot_id = file.read().strip()
    except OSError:
        boot_id = ""
    return ProcessIdentity(socket.gethostname(), boot_id, namespace, pid, _status(pid)[2])


def _status(pid: int) -> tuple[str, int, int]:
    """State letter, number of threads and start ticks; ("", 0, 0) without `/proc`.

    The main thread may end before the others.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The second field, the name, is in parentheses and may contain any characters.
            fields = file.read().rpartition(")")[2].split()
        return fields[0], int(fields[17]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return "", 0, 0


_MIN_SECONDS, _MAX_SECONDS = 0.1, 60.0


class Renewal(threading.Thread):
    """Daemon thread that renews a save marker until `stopping` is set; if the marker is gone, it sets `lost`."""

    def __init__(self, store: Store, marker: str, stale_after_seconds: float) -> None:
        super().__init__(name="dcp-io-marker", daemon=True)
        self._store = store
        self._marker = marker
        self._interval_seconds = min(_MAX_SECONDS, max(_MIN_SECONDS, stale_after_seconds / 10))
        self.stopping = threading.Event()
        self.lost = False

    def begin(self) -> None:
        """Start the thread when it is due; most saves end earlier."""
        due = time.monotonic() + self._interval_seconds
        with _starter.changed:
            _starter.due[self] = due
            if _starter.thread is None:
                thread = threading.Thread(target=_starter.run, name="dcp-io-renewals", daemon=True)
                thread.start()
                _starter.thread = thread
            elif due < _starter.wakes:
                _starter.changed.notify()

    def stop(self) -> None:
        """Wait for its end. May be called again, and without `begin`."""
        self.stopping.set()
        with _starter.changed:
            _starter.due.pop(self, None)
        if self.is_alive() and self is not threading.current_thread():
            self.join()

    def run(self) -> None:
        """Renew until `stop`."""
        while not self.stopping.is_set() and not self.lost:
            try:
                self._store.touch(self._marker)
            except CheckpointNotFoundError:
                self.lost = True
            except OSError:
                pass
            self.stopping.wait(self._interval_seconds)


class _Starter:
    # One thread per process starts the renewals that are due. It uses no store, so a store that hangs cannot delay
    # another's renewal. It ends when it wakes up and no renewal is left.

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.due: dict[Renewal, float] = {}
        self.thread: threading.Thread | None = None
        self.wakes = 0.0

    def run(self) -> None:
        with self.changed:
            while self.due:
                now = time.monotonic()
                for renewal in [renewal for renewal, due in self.due.items() if due <= now]:
                    try:
                        renewal.start()
                        del self.due[renewal]
                    except RuntimeError:  # the system has no thread to spare
                        self.due[renewal] = now + _MIN_SECONDS
                if self.due:
                    self.wakes = min(self.due.values())
                    self.changed.wait(max(0.0, self.wakes - now))
            self.thread = None


_starter = _Starter()
# In a forked child, its thread and its renewals are the parent's.
os.register_at_fork(after_in_child=_starter.__init__)  # type: ignore[misc]
