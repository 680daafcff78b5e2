"""Saves without an index: whether one may still be running, and so whether `rm` removes its files. Removes nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcp_inspect.printing.output import age
from dcp_io import STALE_AFTER_SECONDS, Store, running_saves
from dcp_manifest import DATA_SUFFIX, SAVE_MARKER_PREFIX

__all__ = ["PATIENCE", "UnfinishedSave", "unfinished_save"]

PATIENCE = age(STALE_AFTER_SECONDS)
"""Time without a write, in words, after which a save that left no marker counts as ended."""


@dataclass(frozen=True, slots=True)
class UnfinishedSave:
    """State of the save in a folder without an index: running, perhaps running, or ended if both fields are None."""

    process: str | None
    """Description of the running save and its process, from its marker; None without a live one."""
    quiet: str | None
    """Age of the newest file in words, if it is so young that a save without a marker may be running; else None."""

    @property
    def reason(self) -> str | None:
        """Why `rm` refuses to remove the files, as a sentence; None if it removes them."""
        if self.process is not None:
            return f"a save is writing to it ({self.process})"
        if self.quiet is not None:
            return f"its newest file was written {self.quiet} ago, so a save may still be running"
        return None

    @property
    def summary(self) -> str:
        """The state in a few words, with what removes the files."""
        if self.process is not None:
            return f"being saved: {self.process}"
        if self.quiet is None:
            return "unfinished: no .metadata, and no live save; `dcp rm` removes it"
        return (
            f"unfinished, or being saved: newest file written {self.quiet} ago; `dcp rm` removes it after {PATIENCE} "
            "without a write, `dcp rm --force` at once"
        )

    def removal(self, path: str) -> str:
        """Return how to remove the files, as a part of a sentence."""
        if self.reason is None:
            return f"`dcp rm {path}` removes what it left"
        when = "when the save has ended" if self.process else f"after {PATIENCE} without a write"
        return f"`dcp rm {path}` removes what it left {when}, `dcp rm --force {path}` at once"


def unfinished_save(store: Store) -> UnfinishedSave:
    """Return the state of the save in a folder without an index.

    A marker in the folder names the process of the save. PyTorch's own saves leave none: they count as perhaps running
    until nothing has been written for `STALE_AFTER_SECONDS`.
    """
    running = running_saves(store, stale_after_seconds=STALE_AFTER_SECONDS)
    if running:
        return UnfinishedSave(running[0], None)
    entries = store.list()
    if any(entry.name.startswith(SAVE_MARKER_PREFIX) for entry in entries):  # of processes that have ended
        return UnfinishedSave(None, None)
    written = max((entry.mtime for entry in entries if entry.name.endswith(DATA_SUFFIX)), default=0.0)
    quiet_seconds = time.time() - written
    return UnfinishedSave(None, age(quiet_seconds) if quiet_seconds < STALE_AFTER_SECONDS else None)
