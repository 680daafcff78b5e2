"""Handles that a rank holds to watch and reach peers: connections, listening sockets, processes, and their poller.

The modules of this folder use them.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcp_ranks.transport.connection import Link

__all__ = ["PeerHandles"]


@dataclass(slots=True)
class PeerHandles:
    """All handles of a rank by file descriptor, so that they can be closed in the end."""

    poller: select.epoll = field(default_factory=select.epoll)
    doors: dict[int, socket.socket] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    watched: dict[int, int] = field(default_factory=dict)
    """File descriptors of processes → their ranks."""

    def add_link(self, link: Link) -> None:
        """Register a connection."""
        self.links[link.fileno()] = link
        self.poller.register(link.fileno(), select.EPOLLIN)

    def drop_link(self, link: Link) -> bool:
        """Close a connection; returns False if the connection is no longer registered."""
        if self.links.pop(link.fileno(), None) is None:
            return False
        self.poller.unregister(link.fileno())
        link.close()
        return True

    def add_doors(self, doors: Iterable[socket.socket]) -> None:
        """Register listening sockets."""
        for door in doors:
            self.doors[door.fileno()] = door
            self.poller.register(door.fileno(), select.EPOLLIN)

    def shut_doors(self) -> None:
        """Close the listening sockets: all ranks have connected."""
        for descriptor, door in self.doors.items():
            self.poller.unregister(descriptor)
            door.close()
        self.doors.clear()

    def add_process(self, descriptor: int, rank: int) -> None:
        """Register the file descriptor of a rank's process."""
        self.watched[descriptor] = rank
        self.poller.register(descriptor, select.EPOLLIN)

    def drop_process(self, descriptor: int) -> int:
        """Close the file descriptor of a process, and return its rank."""
        self.poller.unregister(descriptor)
        os.close(descriptor)
        return self.watched.pop(descriptor)

    def close(self) -> None:
        """Close all handles."""
        for link in self.links.values():
            link.close()
        for door in self.doors.values():
            door.close()
        for descriptor in self.watched:
            os.close(descriptor)
        self.links.clear()
        self.doors.clear()
        self.watched.clear()
        self.poller.close()
