"""A run's checkpoints over its tiers, and whether each copy is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dcp_base import DcpError
from dcp_io import HostStore, Store
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.copy_notes import CopyNote
from dcp_manifest import index_of
from dcp_manifest.folders.find_checkpoints import file_sizes
from dcp_manifest.folders.folder import DATA_SUFFIX, is_index_name, put_aside_reason
from dcp_manifest.index.columns import needed_bytes


@dataclass(frozen=True, slots=True)
class CopyState:
    """One checkpoint in one tier; with `per_host`, this host's part."""

    state: Literal["complete", "incomplete", "damaged"]
    """`complete`: index and data files have full length. `incomplete`: no index yet; a save or promotion runs or was
    interrupted. `damaged`: quarantined, or files are missing, short or unreadable.
    """
    bytes: int
    """Of the data files, without copies of other hosts' parts."""
    problem: str | None = None
    save_id: str | None = None
    """None if PyTorch wrote the index, or it is unreadable."""
    protected: bool = False
    """Whether each host's part is on another host, too."""


@dataclass(frozen=True, slots=True)
class TieredStep:
    """Copies of one step's checkpoint."""

    step: int
    copies: tuple[CopyState | None, ...]
    """One per tier, nearest first."""

    @property
    def complete_in(self) -> tuple[int, ...]:
        """Numbers of the tiers with a complete copy, from 0 for the nearest."""
        return tuple(number for number, copy in enumerate(self.copies) if copy is not None and copy.state == "complete")


def list_steps(catalogues: Sequence[Catalogue | None]) -> list[TieredStep]:
    """Return the steps, ascending, from all indexes; None is an unreachable tier. Raises OSError."""
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
        note = CopyNote.read(store, entries)
        if isinstance(store, HostStore):
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
