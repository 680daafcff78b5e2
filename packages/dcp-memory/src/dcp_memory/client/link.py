"""`Link`: this process's connection to a keeper, which it starts if need be."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dcp_io import StorageError
from dcp_memory.errors import KeeperLostError, KeeperRefusedError
from dcp_memory.places import FOLDER_VARIABLE, KeeperFolder, peer_of
from dcp_memory.wire import HEAD, VERSION, decode_head, decode_json, encode

START_TIMEOUT_SECONDS = 60.0
ANSWER_TIMEOUT_SECONDS = 20.0
"""Time limit of an answer, shorter than that of `dcp_io.TimedCall`. A keeper never waits."""
_POLL_SECONDS = 0.02
_STARTS = 3
_OPTIONS = ("max_bytes", "generations", "idle_timeout_seconds", "with_parent")


class NoKeeperError(Exception):
    """The run has no keeper; internal."""


class Answer:
    """Answer of a keeper."""

    __slots__ = ("descriptor", "epoch", "fields", "payload", "promised")

    def __init__(self, fields: dict[str, Any], payload: memoryview, descriptor: int | None, *, promised: bool) -> None:
        self.fields, self.payload, self.descriptor = fields, payload, descriptor
        self.promised = promised
        """Whether a descriptor was sent, which is lost if this process has too many."""
        self.epoch = 0


class Link:
    """Connection to the keeper of a run, opened on demand.

    After one unanswered request, requests fail immediately until the keeper answers.
    """

    def __init__(self, folder: str, run: str) -> None:
        self.folder, self.run = folder, run
        self.epoch = 0
        """Number of the current connection. Everything of an older one is lost."""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._unanswered: socket.socket | None = None
        """Connection of an unanswered request."""
        self._keeps_alive = False
        self._later: deque[tuple[int, int]] = deque()
        self.when_lost: list[Callable[[], object]] = []

    @property
    def name(self) -> str:
        """URI of the run."""
        return f"keeper://{self.run}"

    def ask(self, fields: Mapping[str, Any], payload: bytes | memoryview = b"", *, epoch: int | None = None) -> Answer:
        """Send a request on the connection `epoch` (None: any); return the answer.

        Raises:
            NoKeeperError: The run has no keeper.
            KeeperLostError: The connection of this epoch is lost, or the keeper does not answer.
            StorageError: The keeper's memory is full; `errno` is ENOSPC.
            KeeperRefusedError: The keeper or its folder belongs to another user.
        """
        with self._lock:
            for attempt in range(2):
                if epoch is not None and (epoch != self.epoch or self._socket is None):
                    raise self._lost()
                if self._socket is None:
                    self._connect()
                try:
                    self._send_releases()
                    answer = self._exchange(fields, payload)
                except (ConnectionError, ValueError) as error:
                    if epoch is not None or attempt:
                        raise self._lost() from error
                else:
                    answer.epoch = self.epoch
                    break
        return self._checked(answer)

    def insist(
        self, options: Mapping[str, Any], fields: Mapping[str, Any], payload: bytes | memoryview = b""
    ) -> Answer:
        """Do as `ask`, with a new keeper if there is none; raise StorageError if its start fails."""
        for _ in range(_STARTS):
            self.start(options)
            # The keeper to which this process was connected may have ended.
            with contextlib.suppress(NoKeeperError):
                return self.ask(fields, payload)
        raise KeeperLostError(f"the keeper of {self.name} ends as soon as it is started")

    def start(self, options: Mapping[str, Any], timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        """Start a keeper unless one runs; raise StorageError. It is not idle while this process is connected."""
        with self._lock:
            if self._socket is not None:
                try:
                    if not self._keeps_alive:
                        self._exchange({"do": "stay"}, b"")
                        self._keeps_alive = True
                except KeeperLostError:  # it is silent
                    raise
                except (OSError, ValueError):
                    pass  # it has ended
                else:
                    return
            self._keeps_alive = True
            deadline = time.monotonic() + timeout_seconds
            while not self._is_there():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise KeeperLostError(f"the keeper of {self.name} ends as soon as it is started")
                # Another process may just start one, or the last one may just end.
                start_process(self.run, self.folder, options, left)
                time.sleep(_POLL_SECONDS)

    def _is_there(self) -> bool:
        """Connect; return False if there is no keeper or it is ending, and raise if it is silent."""
        try:
            self._connect()
        except (NoKeeperError, KeeperLostError):
            if self._unanswered is not None:
                raise
            return False
        return True

    def release_later(self, epoch: int, number: int) -> None:
        """Note that an object is not needed; for finalizers, which must not wait for a lock."""
        self._later.append((epoch, number))
        if self._lock.acquire(blocking=False):
            try:
                with contextlib.suppress(OSError, ValueError):
                    if self._socket is not None:
                        self._send_releases()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        with self._lock:
            self._disconnect()
            self._forget_unanswered()

    def abandon(self) -> None:
        """Close the parent's connection in a forked child."""
        if self._socket is not None:
            self._socket.close()
        self._forget_unanswered()
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
        if self._unanswered is not None:
            if not _has_come(self._unanswered):
                raise self._silent()
            self._forget_unanswered()
        for attempt in range(_STARTS):
            self._socket = connect_to(self.folder, self.run)
            self.epoch += 1
            try:
                self._exchange({"do": "greet", "version": VERSION, "keeps_alive": self._keeps_alive}, b"")
            except KeeperLostError:  # it is silent
                raise
            except (OSError, ValueError) as error:
                if attempt == _STARTS - 1:
                    raise KeeperLostError(
                        f"the keeper of {self.name} closes its connections: it is of another version of dcp-memory"
                    ) from error
                time.sleep(_POLL_SECONDS)  # it is ending: there will be none, or another one
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
        except TimeoutError as error:
            self._socket, self._unanswered = None, connection
            self._report_lost()
            raise self._silent() from error
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
            raise StorageError(errno.ENOSPC, f"{self.name}: {answer.fields.get('message')}")
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
            self._report_lost()

    def _report_lost(self) -> None:
        for function in self.when_lost:
            function()

    def _forget_unanswered(self) -> None:
        connection, self._unanswered = self._unanswered, None
        if connection is not None:
            connection.close()

    def _silent(self) -> KeeperLostError:
        return KeeperLostError(
            f"the keeper of {self.name} has not answered for {ANSWER_TIMEOUT_SECONDS:g} s: is its process stopped?"
        )

    def _lost(self) -> KeeperLostError:
        return KeeperLostError(
            f"the connection to the keeper of {self.name} was lost, and with it what was being written: has the keeper "
            "ended?"
        )


def _has_come(connection: socket.socket) -> bool:
    poller = select.poll()  # unlike `select`, for descriptors of any number
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(0))


@contextlib.contextmanager
def open_keepers(folder: str) -> Iterator[KeeperFolder]:
    """Open the directory of keepers; raise FileNotFoundError or KeeperRefusedError."""
    try:
        opened = KeeperFolder(folder)
    except PermissionError as error:
        raise KeeperRefusedError(str(error)) from error
    with opened:
        yield opened


def connect_to(folder: str, run: str, timeout_seconds: float | None = None) -> socket.socket:
    """Return a new connection to a keeper; raise as `Link.ask` does."""
    timeout_seconds = ANSWER_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with open_keepers(folder) as opened:
            _connect(connection, opened.socket_path(run), timeout_seconds)
        connection.settimeout(timeout_seconds)
        _check_owner(connection, run, folder)
    except BaseException as error:
        connection.close()
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            raise NoKeeperError from None
        if isinstance(error, TimeoutError):
            raise KeeperLostError(f"the keeper of keeper://{run} does not accept connections") from error
        raise
    return connection


def _check_owner(connection: socket.socket, run: str, folder: str) -> None:
    _, uid = peer_of(connection)
    if uid != os.geteuid():
        raise KeeperRefusedError(
            f"the keeper of keeper://{run} in {folder} is a process of user {uid}, and this one of user "
            f"{os.geteuid()}: start one of your own, in another directory ({FOLDER_VARIABLE})"
        )


def _connect(connection: socket.socket, path: str, timeout_seconds: float) -> None:
    connection.setblocking(False)
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            connection.connect(path)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_POLL_SECONDS)
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
    """Read `size` bytes; the connection may end before the first unless `begun`."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view) if begun else 0
        if not count:
            raise ConnectionResetError("the keeper has closed the connection")
        view = view[count:]
    return data


def check_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a new keeper's options; raise ValueError for an unknown one."""
    given = dict(options or {})
    unknown = sorted(given.keys() - {*_OPTIONS})
    if unknown:
        raise ValueError(f"a keeper has no option {', '.join(unknown)}; it has {', '.join(_OPTIONS)}")
    return given


def start_process(
    run: str, folder: str, options: Mapping[str, Any], timeout_seconds: float = START_TIMEOUT_SECONDS
) -> None:
    """Start a keeper in its own session, unless this run has one, and wait until it accepts connections.

    Raises StorageError, with the keeper's output, after `timeout_seconds`.
    """
    arguments = [run, "--detach"]
    for name, value in options.items():
        if name == "with_parent" and value is True:
            value = os.getpid()
        if value is not None and value is not False:
            arguments.append(f"--{name.replace('_', '-')}={value}")
    # Unlike `python -m`, this imports nothing from the working folder.
    code = "import sys; sys.path = [*filter(None, sys.path)]; from dcp_memory.keeper.__main__ import main; "
    command = [sys.executable, "-c", f"{code}sys.exit(main(sys.argv[1:]))", *arguments]
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "DCP_KEEPER_DIR": folder, "PYTHONPATH": paths}
    try:
        done = subprocess.run(  # noqa: S603 - our own module, by this interpreter
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(
            f"the keeper of {run} was not ready within {timeout_seconds:g} s; see {folder}/{run}.log"
        ) from error
    except OSError as error:
        raise StorageError(f"the keeper of {run} could not be started: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-2000:]
        said = said.rpartition("keeper: error: ")[2] if said.startswith("usage: ") else said
        raise StorageError(f"the keeper of {run} could not be started: {said or done.returncode}")
