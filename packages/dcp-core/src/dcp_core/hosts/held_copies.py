"""What hosts hold of a checkpoint, the saves it may be loaded from, and whether one is complete over all hosts.

Complete: some host, or a storage that all share, has each of its files in full length. Files of different saves are
never combined: their names have the save's id.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcp_core.errors import CheckpointNotFoundError, DcpError
from dcp_core.logs import library_logger
from dcp_io import HostStore, Store
from dcp_manifest import DATA_SUFFIX, METADATA_NAME, file_sizes, needed_bytes, read_index

__all__ = ["AgreedCopy", "Candidate", "Held", "candidates_of", "complete_copy", "look"]

_log = library_logger(__name__)


@dataclass(frozen=True, slots=True)
class AgreedCopy:
    """The save that all ranks load."""

    index: bytes
    """Bytes of its index."""
    elsewhere: dict[str, int]
    """Files that no host has → number of the shared folder (see `HostStore.also`) that has them."""


@dataclass(frozen=True, slots=True)
class Held:
    """What one place has."""

    created: int | None
    """Time at which the save of its index was made, nanoseconds; None without a readable index."""
    save_id: str | None
    sizes: dict[str, int]
    """Sizes of its data files."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A save, and where its index is: with a rank, or (`also`) in a shared folder, which the coordinator reads."""

    created: int
    save_id: str
    rank: int
    also: int | None = None


def look(store: HostStore) -> Held:
    """Return what this host holds of the checkpoint in a folder."""
    entries = store.list()
    sizes = {entry.name: entry.bytes for entry in entries if entry.name.endswith(DATA_SUFFIX)}
    known = _identify(store) if any(entry.name == METADATA_NAME for entry in entries) else None
    created, save_id = known or (None, None)
    return Held(created, save_id, sizes)


def _identify(store: Store) -> tuple[int, str] | None:
    """Return time and id of the save whose index is in a folder; None if it cannot be read, or is stock's."""
    try:
        info = read_index(store.read(METADATA_NAME), file=METADATA_NAME).info
    except CheckpointNotFoundError:
        return None
    except (OSError, DcpError) as error:
        _log.warning("the index in %s is passed over: %s", store.url, error)
        return None
    return None if info is None else (info.created_ns, info.save_id)


def candidates_of(found: Sequence[Held | None], also: Sequence[Store], rank: int) -> list[Candidate]:
    """Return the saves that have an index somewhere, the newest first, each with the nearest index."""
    known: dict[str, Candidate] = {}
    for number, one in enumerate(found):
        if one is not None and one.save_id is not None and one.created is not None:
            known.setdefault(one.save_id, Candidate(one.created, one.save_id, number))
    for number, store in enumerate(also):
        if identity := _identify(store):
            known.setdefault(identity[1], Candidate(*identity, rank, number))
    return sorted(known.values(), key=lambda one: (one.created, one.save_id), reverse=True)


def complete_copy(data: bytes, candidate: Candidate, held: Sequence[Held], also: Sequence[Store]) -> AgreedCopy | str:
    """Return the copy if all of its files are somewhere, or what it lacks. Ranks: the coordinator."""
    needed = needed_bytes(read_index(data, file=METADATA_NAME))
    largest: defaultdict[str, int] = defaultdict(lambda: -1)
    for one in held:
        for name, size in one.sizes.items():
            largest[name] = max(largest[name], size)
    lost = {name: size for name, size in needed.items() if largest[name] < size}
    elsewhere: dict[str, int] = {}
    for number, store in enumerate(also):
        elsewhere.update(dict.fromkeys(_sized(store, lost), number))
        lost = {name: size for name, size in lost.items() if name not in elsewhere}
    if lost:
        return f"save {candidate.save_id} lacks {len(lost)} of {len(needed)} files, such as {min(lost)}"
    return AgreedCopy(data, elsewhere)


def _sized(store: Store, wanted: Mapping[str, int]) -> list[str]:
    """Return the files that a shared folder has in full length; none if it cannot be read."""
    with contextlib.suppress(OSError, DcpError):
        sizes = file_sizes(store, wanted) if wanted else {}
        return [name for name, size in sizes.items() if size is not None and size >= wanted[name]]
    return []
