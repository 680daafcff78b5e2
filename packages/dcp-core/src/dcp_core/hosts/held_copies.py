"""Find which save's files hosts have in full length. Files of different saves are never combined."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dcp_base.logs import library_logger
from dcp_core.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_io import HostStore, Store
from dcp_io.timed_call import TimedCall
from dcp_manifest import CheckpointIndex, read_index
from dcp_manifest.folders.find_checkpoints import file_sizes
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME
from dcp_manifest.index.columns import needed_bytes

_log = library_logger(__name__)

_DAMAGE = (CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError)


@dataclass(frozen=True, slots=True)
class AgreedCopy:
    """The save that all ranks load."""

    index: bytes
    elsewhere: dict[str, int]
    """File that no host has → number of its shared directory (see `HostStore.also`)."""


@dataclass(frozen=True, slots=True)
class Held:
    """Files of the checkpoint in one directory."""

    created: int | None
    """Nanoseconds of the indexed save, if readable."""
    save_id: str | None
    sizes: dict[str, int]
    damage: DcpError | None = None
    is_bare: bool = False
    failure: OSError | None = None


@dataclass(frozen=True, slots=True)
class Lack:
    """A file that exists nowhere in full length."""

    text: str
    file: str
    key: str | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A save, and the rank or shared directory with its index."""

    created: int
    save_id: str
    rank: int
    also: int | None = None


def look(store: HostStore) -> Held:
    """Return what this host holds."""
    try:
        entries = store.list()
        if not entries:
            place = store.parent()
            return Held(None, None, {}, is_bare=not (place.list() or place.folders()))
    except OSError as error:
        _log.warning("%s cannot be read, and what it has is not counted: %s", store.url, error)
        return Held(None, None, {}, failure=error)
    sizes = {entry.name: entry.bytes for entry in entries if entry.name.endswith(DATA_SUFFIX)}
    known = _identify(store) if any(entry.name == METADATA_NAME for entry in entries) else None
    if isinstance(known, DcpError):
        return Held(None, None, sizes, known)
    created, save_id = known or (None, None)
    return Held(created, save_id, sizes)


def _identify(store: Store) -> tuple[int, str] | DcpError | None:
    try:
        info = read_index(store.read(METADATA_NAME), file=METADATA_NAME).info
    except CheckpointNotFoundError:
        return None
    except (OSError, DcpError) as error:
        _log.warning("the index in %s is passed over: %s", store.url, error)
        return error if isinstance(error, _DAMAGE) else None
    return None if info is None else (info.created_ns, info.save_id)


def _identify_in_time(store: Store) -> tuple[int, str] | DcpError | None:
    """None also for a shared directory that does not answer: the hosts may have everything."""
    try:
        return TimedCall(store.url, partial(_identify, store)).result()
    except TimeoutError as error:
        _log.warning("%s; what it has is not counted", error)
        return None


def candidates_of(
    found: Sequence[Held | None], also: Sequence[Store], rank: int
) -> tuple[list[Candidate], DcpError | None]:
    """Return indexed saves, newest first, and an index's damage."""
    known: dict[str, Candidate] = {}
    damage = next((one.damage for one in found if one is not None and one.damage is not None), None)
    for number, one in enumerate(found):
        if one is not None and one.save_id is not None and one.created is not None:
            known.setdefault(one.save_id, Candidate(one.created, one.save_id, number))
    for number, store in enumerate(also):
        identity = _identify_in_time(store)
        if isinstance(identity, tuple):
            known.setdefault(identity[1], Candidate(*identity, rank, number))
        else:
            damage = damage or identity
    return sorted(known.values(), key=lambda one: (one.created, one.save_id), reverse=True), damage


def complete_copy(data: bytes, candidate: Candidate, held: Sequence[Held], also: Sequence[Store]) -> AgreedCopy | Lack:
    """Return the copy if all its files exist."""
    index = read_index(data, file=METADATA_NAME)
    needed = needed_bytes(index)
    largest: defaultdict[str, int] = defaultdict(lambda: -1)
    for one in held:
        for name, size in one.sizes.items():
            largest[name] = max(largest[name], size)
    lost = {name: size for name, size in needed.items() if largest[name] < size}
    elsewhere: dict[str, int] = {}
    for number, store in enumerate(also):
        elsewhere.update(dict.fromkeys(_sized(store, lost), number))
        lost = {name: size for name, size in lost.items() if name not in elsewhere}
    if not lost:
        return AgreedCopy(data, elsewhere)
    missing = [name for name in lost if largest[name] < 0]
    name = min(missing or lost)
    key = _key_in(index, name)
    text = f"save {candidate.save_id} lacks {len(lost)} of {len(needed)} files, such as {name} with {key!r}"
    if not missing:
        text += f", of which {largest[name]:,} of {lost[name]:,} bytes are there"
    return Lack(text, name, key, truncated=not missing)


def _key_in(index: CheckpointIndex, file: str) -> str | None:
    number = index.files.index(file)
    if index.chunk_items is not None:
        rows = np.flatnonzero(index.chunk_items.file == number)
        if len(rows):
            return index.tensor_names[int(np.searchsorted(index.chunk_starts(), rows[0], "right")) - 1]
    if index.object_items is not None:
        rows = np.flatnonzero(index.object_items.file == number)
        if len(rows):
            return index.object_names[int(rows[0])]
    return None


def _sized(store: Store, wanted: Mapping[str, int]) -> list[str]:
    with contextlib.suppress(OSError, DcpError):
        sizes = TimedCall(store.url, partial(file_sizes, store, wanted)).result() if wanted else {}
        return [name for name, size in sizes.items() if size is not None and size >= wanted[name]]
    return []
