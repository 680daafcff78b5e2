"""Keepers that this process is connected to: one `Connection` for each, which stores, sinks and lenders share."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from dcp_memory.client.lender import Lender
from dcp_memory.client.link import Link
from dcp_memory.client.mapped import Segments
from dcp_memory.places import folder_path

__all__ = ["Connection", "connection_to"]


class Connection:
    """What this process has of a keeper.

    Args:
        folder: Folder of keepers.
        run: Name of the run.
    """

    def __init__(self, folder: str, run: str) -> None:
        self.link = Link(folder, run)
        self.segments = Segments(self.link)
        self._lender: Lender | None = None

    def lender(self, options: Mapping[str, Any]) -> Lender:
        """Return what borrows memory of the keeper; the same for all.

        Args:
            options: Options of a keeper that has to be started.
        """
        if self._lender is None:
            self._lender = Lender(self.link, options)
        return self._lender

    def abandon(self) -> None:
        """Leave everything to the parent, in a forked child."""
        self.link.abandon()
        self.segments.abandon()
        if self._lender is not None:
            self._lender.abandon()


_lock = threading.Lock()
_connections: dict[tuple[str, str], Connection] = {}


def connection_to(run: str) -> Connection:
    """Return the connection of this process to the keeper of a run on this host, which need not be there."""
    key = folder_path(), run
    with _lock:
        found = _connections.get(key)
        if found is None:
            found = _connections[key] = Connection(*key)
        return found


def _abandon() -> None:
    """Leave the connections to the parent in a forked child."""
    global _lock  # noqa: PLW0603 - a thread of the parent may hold the old one
    _lock = threading.Lock()
    for each in _connections.values():
        each.abandon()


os.register_at_fork(after_in_child=_abandon)


def forget_connections(folder: str) -> None:
    """Close the connections to all keepers of a folder, as a process does at its end."""
    with _lock:
        for key in [key for key in _connections if key[0] == folder]:
            _connections.pop(key).link.close()
