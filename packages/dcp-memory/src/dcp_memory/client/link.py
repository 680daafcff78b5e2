"""`Link`: the connection of this process to a keeper, shared by its threads; made on demand, and again when lost."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dcp_memory.errors import KeeperFullError, KeeperLostError, KeeperRefusedError
from dcp_memory.places import FOLDER_VARIABLE, KeeperFolder, peer_of
from dcp_memory.starting import START_SECONDS, start_process
from dcp_memory.wire import HEAD, VERSION, FrameError, decode_head, decode_json, encode

__all__ = ["Answer", "Link", "NoKeeperError", "connect_to"]

ANSWER_SECONDS = 60.0
"""Time within which a keeper must answer; it never waits for anything."""
_RETRY_SECONDS = 0.02
_STARTS = 3


class NoKeeperError(Exception):
    """No keeper of the run is there; internal."""


class Answer:
    """Answer of a keeper: its fields, the bytes that follow them, and a file descriptor if it has one."""

    __slots__ = ("descriptor", "epoch", "fields", "payload", "promised")

    def __init__(self, fields: dict[str, Any], payload: memoryview, descriptor: int | None, *, promised: bool) -> None:
        self.fields, self.payload, self.descriptor = fields, payload, descriptor
        self.promised = promised
        """Whether the keeper has sent a descriptor, which is lost if this process has too many."""
        self.epoch = 0
        """Number of the connection on which it came."""


class Link:
    """Connection to the keeper of a run.

    Args:
        folder: Folder of keepers.
        run: Name of the run.
    """

    def __init__(self, folder: str, run: str) -> None:
        self.folder, self.run = folder, run
        self.epoch = 0
        """Number of the current connection; what belongs to an older one is lost."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._keeps_alive = False
        self._later: deque[tuple[int, int]] = deque()
        self.when_lost: list[Callable[[], object]] = []
        """Functions to call when a connection has ended."""

    @property
    def name(self) -> str:
        """URI of the run, for messages."""
        return f"keeper://{self.run}"

    def ask(self, fields: Mapping[str, Any], payload: bytes | memoryview = b"", *, epoch: int | None = None) -> Answer:
        """Send a request and return the answer.

        Args:
            fields: The request.
            payload: Bytes that belong to it.
            epoch: Connection to which the request belongs; None if any will do.

        Raises:
            NoKeeperError: No keeper of the run is there.
            KeeperLostError: The connection of this epoch is lost, or the keeper does not answer.
            KeeperFullError: The keeper has no memory left.
            KeeperRefusedError: The keeper, or the folder of keepers, is another user's.
        """
        with self._lock:
            for attempt in range(2):
                if epoch is not None and (epoch != self.epoch or self._socket is None):
                    raise self._lost()
                fresh = self._socket is None
                if fresh:
                    self._connect()
                try:
                    self._send_releases()
                    answer = self._exchange(fields, payload)
                except (ConnectionError, FrameError) as error:
                    if epoch is not None or fresh or attempt:
                        raise self._lost() from error
                except TimeoutError as error:
                    raise self._silent() from error
                else:
                    answer.epoch = self.epoch
                    break
        return self._checked(answer)

    def insist(
        self, options: Mapping[str, Any], fields: Mapping[str, Any], payload: bytes | memoryview = b""
    ) -> Answer:
        """Send a request to a keeper of the run, which is started if there is none; return the answer.

        Args:
            options: Options of the keeper if it is started.
            fields: The request.
            payload: Bytes that belong to it.

        Raises:
            KeeperStartError: No keeper could be started.
            OSError: As for `ask`.
        """
        for _ in range(_STARTS):
            self.start(options)
            # The keeper to which this process was connected may have ended.
            with contextlib.suppress(NoKeeperError):
                return self.ask(fields, payload)
        raise KeeperLostError(f"the keeper of {self.name} ends as soon as it is started")

    def start(self, options: Mapping[str, Any], seconds: float = START_SECONDS) -> None:
        """Make sure that a keeper of the run is there: start one if there is none.

        From now on, the keeper does not count as idle while this process is there.

        Raises:
            KeeperStartError: It could not be started.
        """
        with self._lock:
            if self._socket is not None:
                try:
                    if not self._keeps_alive:
                        self._exchange({"do": "stay"}, b"")
                        self._keeps_alive = True
                except (OSError, FrameError):
                    pass  # it has ended
                else:
                    return
            self._keeps_alive = True
            deadline = time.monotonic() + seconds
            while True:
                with contextlib.suppress(NoKeeperError, KeeperLostError):
                    self._connect()
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise KeeperLostError(f"the keeper of {self.name} ends as soon as it is started")
                # Another process may just start one, or the last one may just end.
                start_process(self.run, self.folder, options, left)
                time.sleep(_RETRY_SECONDS)

    def release_later(self, epoch: int, number: int) -> None:
        """Note that an open object is not needed any more; for finalizers, which must not wait for a lock."""
        self._later.append((epoch, number))
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, FrameError):
                    if self._socket is not None:
                        self._send_releases()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the connection; the next request makes another one."""
        with self._lock:
            self._disconnect()

    def abandon(self) -> None:
        """Close the connection in a forked child: it is the parent's."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._lock, self._keeps_alive = None, threading.Lock(), False
        self._later.clear()
        self.epoch += 1

    def _send_releases(self) -> None:
        numbers = []
        while self._later:
            epoch, number = self._later.popleft()
            if epoch == self.epoch:
                numbers.append(number)
        if numbers:
            self._exchange({"do": "release", "ids": numbers}, b"")

    def _connect(self) -> None:
        for attempt in range(_STARTS):
            self._socket = connect_to(self.folder, self.run)
            self.epoch += 1
            try:
                self._exchange({"do": "greet", "version": VERSION, "keeps_alive": self._keeps_alive}, b"")
            except TimeoutError as error:
                raise self._silent() from error
            except (OSError, FrameError) as error:
                if attempt == _STARTS - 1:
                    raise KeeperLostError(
                        f"the keeper of {self.name} closes its connections: it is of another version of dcp-memory"
                    ) from error
                time.sleep(_RETRY_SECONDS)  # it is ending: there will be none, or another one
            else:
                return

    def _exchange(self, fields: Mapping[str, Any], payload: bytes | memoryview) -> Answer:
        connection = self._socket
        if connection is None:
            raise ConnectionError
        frame = encode(fields, len(payload))
        try:
            _send(connection, [memoryview(frame), memoryview(payload)])
            return self._receive(connection)
        except BaseException:  # also an interrupt: the next answer would be taken for that of another request
            self._disconnect()
            raise

    def _receive(self, connection: socket.socket) -> Answer:
        head, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 1, socket.MSG_CMSG_CLOEXEC)
        descriptor = descriptors[0] if descriptors else None
        try:
            head += _read(connection, HEAD.size - len(head), begun=bool(head))
            promised, json_bytes, payload_bytes = decode_head(head)
            content = memoryview(_read(connection, json_bytes + payload_bytes, begun=True))
            fields = decode_json(content[:json_bytes])
            return Answer(fields, content[json_bytes:], descriptor, promised=promised)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise

    def _checked(self, answer: Answer) -> Answer:
        error = answer.fields.get("error")
        if error == "full":
            raise KeeperFullError(errno.ENOSPC, f"{self.name}: {answer.fields.get('message')}")
        if error == "system":
            raise OSError(answer.fields.get("number"), f"the keeper of {self.name}: {answer.fields.get('message')}")
        if error == "bad":
            raise KeeperLostError(f"the keeper of {self.name} refused a request: {answer.fields.get('message')}")
        if answer.promised and answer.descriptor is None:
            raise OSError(errno.EMFILE, f"{self.name}: too many open files in this process to get memory of the keeper")
        return answer

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
            for function in self.when_lost:
                function()

    def _silent(self) -> KeeperLostError:
        return KeeperLostError(
            f"the keeper of {self.name} has not answered for {ANSWER_SECONDS:g} s: is its process stopped?"
        )

    def _lost(self) -> KeeperLostError:
        return KeeperLostError(
            f"the connection to the keeper of {self.name} was lost, and with it what was being written: has the keeper "
            "ended?"
        )


def connect_to(folder: str, run: str, seconds: float = ANSWER_SECONDS) -> socket.socket:
    """Return a new connection to the keeper of a run.

    Args:
        folder: Folder of keepers.
        run: Name of the run.
        seconds: Limit of each wait on the connection.

    Raises:
        NoKeeperError: There is none.
        KeeperLostError: It does not accept connections.
        KeeperRefusedError: It, or the folder, is another user's.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with KeeperFolder(folder) as opened:
            _connect(connection, opened.socket_path(run), seconds)
        connection.settimeout(seconds)
        _check_owner(connection, run, folder)
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            raise NoKeeperError from None
        if isinstance(error, PermissionError):
            raise KeeperRefusedError(str(error)) from error
        if isinstance(error, TimeoutError):
            raise KeeperLostError(f"the keeper of keeper://{run} does not accept connections") from error
        raise
    return connection


def _check_owner(connection: socket.socket, run: str, folder: str) -> None:
    _, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PermissionError(
            f"the keeper of keeper://{run} in {folder} is a process of user {uid}, and this one of user "
            f"{os.geteuid()}: start one of your own, in another folder ({FOLDER_VARIABLE})"
        )


def _connect(connection: socket.socket, path: str, seconds: float) -> None:
    """Connect to a socket; wait while its queue is full."""
    connection.setblocking(False)
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _send(connection: socket.socket, waiting: list[memoryview]) -> None:
    while waiting := [part for part in waiting if len(part)]:
        sent = connection.sendmsg(waiting)
        while waiting and sent >= len(waiting[0]):
            sent -= len(waiting.pop(0))
        if sent:
            waiting[0] = waiting[0][sent:]


def _read(connection: socket.socket, size: int, *, begun: bool) -> bytearray:
    """Read so many bytes; `begun` is False if the connection has ended before the first of the frame."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view) if begun else 0
        if not count:
            raise ConnectionResetError("the keeper has closed the connection")
        view = view[count:]
    return data
