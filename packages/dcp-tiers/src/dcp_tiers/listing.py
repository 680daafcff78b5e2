"""Listing of a run's checkpoints over its tiers: which step is where, and whether its copy there is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dcp_io import Catalogue, Store, read_copy_note
from dcp_manifest import DATA_SUFFIX, DcpError, file_sizes, index_of, is_index_name, needed_bytes, put_aside_reason

__all__ = ["CopyState", "TieredStep", "list_steps"]


@dataclass(frozen=True, slots=True)
class CopyState:
    """State of one checkpoint in one tier; in a tier of each host (`per_host`), of the part that this host has."""

    state: Literal["complete", "incomplete", "damaged"]
    """`complete`: index and data files are there in full length. `incomplete`: there are files, but no index yet: a
    save or promotion is running or was interrupted. `damaged`: quarantined, or files are missing, short, unreadable."""
    bytes: int
    """Size of the data files that are there, without copies of other hosts' parts."""
    problem: str | None = None
    """Description of the damage."""
    save_id: str | None = None
    """Id of the save; None if there is no readable index, or PyTorch wrote it."""
    protected: bool = False
    """Whether each host's part is on another host, too."""


@dataclass(frozen=True, slots=True)
class TieredStep:
    """The copies of one step's checkpoint."""

    step: int
    copies: tuple[CopyState | None, ...]
    """The copy in each tier, nearest first; None where the step is not."""

    @property
    def complete_in(self) -> tuple[int, ...]:
        """Numbers of the tiers, from 0 for the nearest, that have a complete copy."""
        return tuple(number for number, copy in enumerate(self.copies) if copy is not None and copy.state == "complete")


def list_steps(catalogues: Sequence[Catalogue | None]) -> list[TieredStep]:
    """Return the steps by ascending number, with their copies in each tier. Reads all indexes, and no data.

    Args:
        catalogues: Catalogue of each tier, nearest first; None for a tier that cannot be reached.

    Raises:
        OSError: The storage of a tier failed.
    """
    found: dict[int, list[CopyState | None]] = {}
    for number, catalogue in enumerate(catalogues):
        for folder in () if catalogue is None else catalogue.folders():
            copies = found.setdefault(folder.step, [None] * len(catalogues))
            copies[number] = _state(folder.store)
    return [TieredStep(step, tuple(copies)) for step, copies in sorted(found.items())]


def _state(store: Store) -> CopyState | None:
    entries = store.list()
    names = {entry.name for entry in entries}
    size = sum(entry.bytes for entry in entries if entry.name.endswith(DATA_SUFFIX))
    if not any(map(is_index_name, names)):
        return CopyState("incomplete", size) if size else None
    try:
        index = index_of(store)
        needed = needed_bytes(index)
        note = read_copy_note(store, entries)
        if store.place == "host":
            needed = {name: count for name, count in needed.items() if name in names - note.names}
        sizes = file_sizes(store, needed)
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        return CopyState("damaged", size, str(error))
    save_id = index.info.save_id if index.info is not None else None
    problem = put_aside_reason(names)
    for name, wanted in needed.items():
        there = sizes[name]
        if there is None or there < wanted:
            problem = problem or (f"{name} is missing" if there is None else f"{name} has {there} of {wanted} bytes")
    total = sum(there or 0 for there in sizes.values())
    return CopyState("complete" if problem is None else "damaged", total, problem, save_id, note.protected)
