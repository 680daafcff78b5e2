"""`Server`: the main thread of a keeper, which never waits for one client."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import selectors
import socket
import time
from collections.abc import Callable

from dcp_memory.keeper.options import KeeperOptions
from dcp_memory.keeper.peer import Peer
from dcp_memory.keeper.pool import Pool, available_bytes
from dcp_memory.keeper.requests import Keeper, answer
from dcp_memory.places import peer_of
from dcp_memory.wire import VERSION

GREETING_TIMEOUT_SECONDS = 10.0
"""Time within which a client must say what it is."""
_POLL_SECONDS = 1.0
_KEEP_FREE_SECONDS = 600.0
_FIRST_CLIENT_TIMEOUT_SECONDS = 60.0
_MAX_STRANGERS = 64
_MOST_REQUESTS = 64
"""Requests of a client in a row, so that none holds up the others."""
_REFRESH_SECONDS = 3600.0
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


class Server:
    """A keeper that serves until it is stopped. Hourly `refresh` keeps its files from being removed."""

    def __init__(self, options: KeeperOptions, listener: socket.socket, refresh: Callable[[], object]) -> None:
        self._options = options
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for each in (listener, self._woken, self._waker):
            each.setblocking(False)
        self._keeper = Keeper(options, Pool(options.max_bytes, available_bytes, self.wake))
        self._keeper.clients = lambda: sum(peer.greeted for peer in self._peers)
        self._peers: set[Peer] = set()
        self._numbers = itertools.count(1)
        # The process that starts it needs some time to connect.
        self._busy_at = time.monotonic() + _FIRST_CLIENT_TIMEOUT_SECONDS
        self._refresh, self._refreshed_at = refresh, time.monotonic()
        self._accept_at = 0.0
        self._stop = False
        self._parent = self._watch_parent()

    def wake(self) -> None:
        """Make the main thread call `Pool.collect`; callable in any thread, and in signal handlers."""
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def stop(self) -> None:
        """Make `serve` return."""
        self._stop = True
        self.wake()

    def serve(self) -> None:
        """Serve clients until the keeper is stopped, has been idle for too long, or its parent has ended."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._collect)
        checked = 0.0
        while not self._stop:
            for key, _ in self._selector.select(_POLL_SECONDS):
                if isinstance(key.data, Peer):
                    self._serve(key.data)
                else:
                    key.data()
            if time.monotonic() - checked >= _POLL_SECONDS:
                checked = time.monotonic()
                self._check()

    def close(self) -> None:
        """Close all connections and free all memory."""
        used = {each.segment.inode for each in self._keeper.arenas.all() if each.lent}
        for peer in self._peers:
            for stored in peer.opened.values():
                used |= {piece.inode for piece in stored.ranges} | {each.segment.inode for each in stored.arenas}
            for reservation in peer.reservations.values():
                used |= {piece.inode for piece in reservation.ranges}
        self._keeper.pool.close(lambda segment: segment.inode in used)
        for peer in self._peers:
            peer.close()
        self._peers.clear()
        self._selector.close()
        for each in (self._listener, self._woken, self._waker):
            each.close()
        if self._parent is not None:
            os.close(self._parent)

    def _watch_parent(self) -> int | None:
        if self._options.parent is None:
            return None
        try:
            descriptor = os.pidfd_open(self._options.parent)
        except ProcessLookupError:
            self._stop = True
            return None
        except (OSError, AttributeError):  # an old kernel: `_check` asks each second
            return None
        self._selector.register(descriptor, selectors.EVENT_READ, self.stop)
        return descriptor

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _NO_DESCRIPTORS:
                    return
                # Clients wait in the queue until descriptors are free: `_check` listens again.
                self._keeper.pool.reclaim()
                self._selector.unregister(self._listener)
                self._accept_at = time.monotonic() + _POLL_SECONDS
                return
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            _, uid = peer_of(connection)
        except OSError:
            uid = -1
        if uid != os.geteuid():
            connection.close()
            return
        strangers = [peer for peer in self._peers if not peer.greeted]
        if len(strangers) >= _MAX_STRANGERS:
            self._forget(min(strangers, key=lambda peer: peer.since))
        peer = Peer(connection, next(self._numbers))
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _serve(self, peer: Peer) -> None:
        if peer not in self._peers:  # its connection was closed while its event waited
            return
        try:
            if peer.has_output:
                peer.send()
            for _ in range(_MOST_REQUESTS):
                if peer.has_output or (fields := peer.receive()) is None:
                    break
                if peer.greeted:
                    answer(self._keeper, peer, fields)
                else:
                    self._greet(peer, fields)
                self._busy_at = time.monotonic()
            waiting = selectors.EVENT_WRITE if peer.has_output else selectors.EVENT_READ
            if self._selector.get_key(peer.socket).events != waiting:
                self._selector.modify(peer.socket, waiting, peer)
        except (ValueError, OSError):
            self._forget(peer)
        self._stop = self._stop or self._keeper.stopping

    def _greet(self, peer: Peer, fields: dict[str, object]) -> None:
        if fields.get("do") != "greet" or fields.get("version") != VERSION:
            raise ValueError("the first request of a client says what it is")
        peer.greeted = True
        peer.keeps_alive = bool(fields.get("keeps_alive"))
        peer.answer({"pid": os.getpid(), "run": self._options.run, "began": self._keeper.began})

    def _forget(self, peer: Peer) -> None:
        self._peers.discard(peer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.close()
        self._keeper.forget(peer)

    def _collect(self) -> None:
        with contextlib.suppress(OSError):
            while self._woken.recv(4096):
                pass
        self._keeper.pool.collect()

    def _check(self) -> None:
        now = time.monotonic()
        for peer in [peer for peer in self._peers if not peer.greeted and now - peer.since > GREETING_TIMEOUT_SECONDS]:
            self._forget(peer)
        if self._accept_at and now >= self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        if now - self._refreshed_at >= _REFRESH_SECONDS:
            self._refreshed_at = now
            self._refresh()
        self._keeper.slabs.trim(_KEEP_FREE_SECONDS)
        self._keeper.arenas.trim(_KEEP_FREE_SECONDS)
        if any(peer.keeps_alive for peer in self._peers):
            self._busy_at = now
        parent = self._options.parent
        if parent is not None and self._parent is None and not os.path.exists(f"/proc/{parent}"):
            self._stop = True
        if now - self._busy_at > self._options.idle_timeout_seconds:
            self._stop = True
