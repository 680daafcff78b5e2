"""File descriptors with which a rank watches and reaches its peers: connections, listening sockets and processes.

Used by `monitor`.
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
    """The connections, listening sockets and watched processes of one rank, with one poller for all of them.

    Attributes:
        poller: Poller in which all file descriptors are registered.
        doors: File descriptor of a listening socket → the socket.
        links: File descriptor of a connection → the connection.
    """

    poller: select.epoll = field(default_factory=select.epoll)
    doors: dict[int, socket.socket] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    watched: dict[int, int] = field(default_factory=dict)
    """File descriptor of a watched process → rank of that process."""

    def add_link(self, link: Link) -> None:
        """Register a connection, and poll it for data."""
        self.links[link.fileno()] = link
        self.poller.register(link.fileno(), select.EPOLLIN)

    def drop_link(self, link: Link) -> bool:
        """Close a registered connection. Returns False, and does nothing, if it is not registered any more."""
        if self.links.pop(link.fileno(), None) is None:
            return False
        self.poller.unregister(link.fileno())
        link.close()
        return True

    def add_doors(self, doors: Iterable[socket.socket]) -> None:
        """Register listening sockets, and poll them for incoming connections."""
        for door in doors:
            self.doors[door.fileno()] = door
            self.poller.register(door.fileno(), select.EPOLLIN)

    def shut_doors(self) -> None:
        """Close all listening sockets, which are not needed once every rank has connected."""
        for descriptor, door in self.doors.items():
            self.poller.unregister(descriptor)
            door.close()
        self.doors.clear()

    def add_process(self, descriptor: int, rank: int) -> None:
        """Register the file descriptor (pidfd) of a rank's process, and poll it for the end of the process."""
        self.watched[descriptor] = rank
        self.poller.register(descriptor, select.EPOLLIN)

    def has_ended(self, descriptor: int) -> bool:
        """Return whether the process of a file descriptor has ended."""
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def drop_process(self, descriptor: int) -> int:
        """Close the file descriptor of a process, and return the rank of that process."""
        self.poller.unregister(descriptor)
        os.close(descriptor)
        return self.watched.pop(descriptor)

    def close(self) -> None:
        """Close all connections, listening sockets and descriptors of processes."""
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
