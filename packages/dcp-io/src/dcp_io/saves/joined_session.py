"""Participation of a rank in a save that the coordinator runs: the rank's files, and their cleanup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from dcp_io.saves.current_checkpoint import read_current
from dcp_io.saves.save_markers import marker_name
from dcp_io.stores.store import Store
from dcp_manifest.errors import DcpError

__all__ = ["JoinedSave"]


class JoinedSave:
    """Record of the files that this rank has written, for cleanup if the save fails.

    Args:
        store: The checkpoint's folder.
        save_id: Id of the coordinator's save.
    """

    def __init__(self, store: Store, save_id: str) -> None:
        self._store = store
        self._files: set[str] = set()
        self.save_id = save_id

    def wrote(self, files: Iterable[str]) -> None:
        """Record the names of data files that this rank has written."""
        self._files.update(files)

    def abort(self) -> None:
        """Remove this rank's files if the coordinator certainly will not publish them. Failures are not raised.

        As long as the marker of the save exists, the coordinator may still publish: then the files stay, and the
        coordinator or the next save removes them.
        """
        with contextlib.suppress(OSError, DcpError):
            if self._store.exists(marker_name(self.save_id, None)):
                return
            current = read_current(self._store)
            if current.damage is not None:
                return
            kept = current.index.files if current.index is not None else ()
            for name in self._files.difference(kept):
                self._store.delete(name)
