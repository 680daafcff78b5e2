"""Start, stop and status of keepers; `dcp keeper` calls these functions."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dcp_memory.client.link import START_TIMEOUT_SECONDS, Link, NoKeeperError, check_options, connect_to, open_keepers
from dcp_memory.errors import KeeperLostError
from dcp_memory.places import check_run, folder_path, peer_of
from dcp_memory.wire import VERSION, encode

STOP_TIMEOUT_SECONDS = 30.0
_LONGEST_SECONDS = 1_000_000.0
_STOP = encode({"do": "greet", "version": VERSION}) + encode({"do": "stop"})


@dataclass(frozen=True, slots=True)
class KeeperStatus:
    """Memory and objects of a keeper, in bytes unless a name says otherwise."""

    run: str
    pid: int
    began: float
    """Start time, in seconds since 1970."""
    clients: int
    """Number of connections, this one included."""
    objects: int
    object_bytes: int
    bytes: int
    """All memory: arenas, slabs and small objects."""
    max_bytes: int
    arenas: int
    """Segments that are lent to savers."""
    arena_bytes: int
    free_arena_bytes: int
    """Arenas that are neither lent nor used by an object."""
    lent_bytes: int
    slab_bytes: int
    used_slab_bytes: int
    generations: int
    idle_timeout_seconds: float


def start_keeper(run: str, **options: Any) -> KeeperStatus:
    """Start the keeper of a run on this host, unless it runs. It outlives this process.

    Args:
        run: Name of the run: letters, digits and `._-`.
        options: `max_bytes`, the limit of its memory (default: half of what is available at the start);
            `generations`, the number of checkpoints that it keeps (default: 2); `idle_timeout_seconds`, after which it
            ends without a process that saves (default: 1800); `with_parent`, True if it is to end with this process.
            They do not change a running keeper.

    Raises:
        StorageError: The keeper could not be started; the message has its output.
        KeeperRefusedError: The folder of keepers is not this user's alone.
        ValueError: The option does not exist, or the run's name cannot be used.

    Example:
        ```python
        from dcp_memory import start_keeper, stop_keeper

        assert start_keeper("example", max_bytes=1 << 30).objects == 0
        assert stop_keeper("example")
        ```
    """
    given = check_options(options)
    with _link(run) as link:
        link.start(given, START_TIMEOUT_SECONDS)
        return _status(link)


def keeper_runs() -> list[str]:
    """Return this user's runs that seem to have a keeper; raise KeeperRefusedError as `start_keeper`."""
    try:
        with open_keepers(folder_path()) as opened:
            return opened.runs()
    except FileNotFoundError:
        return []


def keeper_status(run: str) -> KeeperStatus | None:
    """Return the status of the keeper of a run; None if there is none.

    Raises:
        KeeperLostError: The keeper does not answer.
        KeeperRefusedError: The keeper belongs to another user.
    """
    with _link(run) as link:
        try:
            return _status(link)
        except NoKeeperError:
            return None


def stop_keeper(run: str, *, timeout_seconds: float = STOP_TIMEOUT_SECONDS, kill: bool = False) -> bool:
    """Stop the keeper of a run and wait until its process has ended. The checkpoints in it are lost.

    Args:
        run: Name of the run.
        timeout_seconds: Time to wait for its end.
        kill: Whether to kill a keeper that does not end in this time.

    Returns:
        Whether there was a keeper.

    Raises:
        KeeperLostError: The keeper has not ended in time; the message has its process.
        ValueError: `timeout_seconds` is less than 0 or not a number, or the run's name cannot be used.
    """
    check_run(run)
    if not timeout_seconds >= 0:
        raise ValueError(f"timeout_seconds={timeout_seconds!r}: pass seconds, at least 0")
    timeout_seconds = min(timeout_seconds, _LONGEST_SECONDS)
    folder = folder_path()
    try:
        connection = connect_to(folder, run, timeout_seconds)
    except NoKeeperError:
        _clear(folder, run)
        return False
    with connection:
        pid, _ = peer_of(connection)
        process = _Process(pid, connection)
        try:
            with contextlib.suppress(OSError):
                connection.sendall(_STOP)
            ended = process.has_ended(timeout_seconds)
            if not ended and kill:
                process.kill()
                ended = process.has_ended(timeout_seconds)
        finally:
            process.close()
    if not ended:
        raise KeeperLostError(
            f"the keeper of {run}, process {pid}, has not ended after {timeout_seconds:g} s: is it stopped? "
            f"`dcp keeper stop {run} --kill` kills it"
        )
    _clear(folder, run)
    return True


class _Process:
    def __init__(self, pid: int, connection: socket.socket) -> None:
        self._pid, self._connection = pid, connection
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, AttributeError):  # an old kernel, or another namespace
            self._descriptor = os.pidfd_open(pid)

    def has_ended(self, timeout_seconds: float) -> bool:
        if self._descriptor is not None:
            poller = select.poll()  # unlike `select`, for descriptors of any number
            poller.register(self._descriptor, select.POLLIN)
            return bool(poller.poll(timeout_seconds * 1000))
        self._connection.settimeout(timeout_seconds)
        try:  # the connection ends with the process
            while self._connection.recv(4096):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._descriptor is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            elif self._pid > 0:
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


@contextlib.contextmanager
def _link(run: str) -> Iterator[Link]:
    link = Link(folder_path(), check_run(run))
    try:
        yield link
    finally:
        link.close()


def _status(link: Link) -> KeeperStatus:
    return KeeperStatus(**link.ask({"do": "status"}).fields)


def _clear(folder: str, run: str) -> None:
    with contextlib.suppress(FileNotFoundError), open_keepers(folder) as opened:
        if run in opened.runs():
            with opened.alone(run) as alone:
                if alone:
                    opened.remove(run)
