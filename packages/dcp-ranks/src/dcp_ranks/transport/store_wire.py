"""Values between ranks through a `torch.distributed` store: `TimedStore` limits each request, `StoreWire` cuts values.

A `TCPStore` waits forever, in native code, if its server is stopped or cut off, so a thread makes each connection's
requests. Before Python 3.14, a thread that returns from native code at interpreter exit aborts the process, so a
signal then stops it for good. Waiting polls: a store's blocking `wait` holds its connection and blocks signal handling.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import os
import pickle
import queue
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch.distributed as dist

from dcp_base.logs import library_logger
from dcp_ranks.errors import CoordinatorLostError
from dcp_ranks.options import DEFAULT_PEERS

STORE_TIMEOUT = timedelta(seconds=30)
"""Timeout for connecting to a store, and for requests over it."""

# TCPStore drops the connection at more than 8 MiB; 1 MiB is where it is fastest.
CHUNK_BYTES = 1 << 20
_WHOLE, _CHUNKED = b"w", b"c"
_ABSENT = "dcp: nothing is stored here"
_FIRST_PAUSE_SECONDS = 0.0005
_LAST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 5.0  # so that all ranks learn soon that another rank has ended a phase
_RANKS_PER_LAST_PAUSE = 64
_POLLS_PER_SECOND = 10_000
"""Polling limit of all ranks together, so that the store has time for requests with data."""

_Answers = queue.SimpleQueue[tuple[Any, BaseException | None]]
_Requests = queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Answers] | None]

_MARGIN_SECONDS = 1.0
"""Added to timeouts, for a machine under load."""
_EXIT_SECONDS = 1.0
"""For all threads to end at interpreter exit, and for one in `rest`."""
_SILENT_SECONDS = 10.0
_PROBES = 12
_MOST_SECONDS = 32767  # Linux takes no more for a keep-alive timer
_UNTIL_TOLD_SECONDS = 2.5  # pauses between two requests, a first retransmission, and what raising takes

_log = library_logger(__name__)


class KeyValueStore(Protocol):
    """Methods of `torch.distributed.Store` that coordinators need."""

    def set(self, key: str, value: bytes, /) -> None: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102


class TimedStore:
    """Connection to a store; each request is answered in time or raises RuntimeError.

    After one unanswered request, all others fail immediately. If the system refuses a thread, requests run in the
    caller's thread without a limit.

    Args:
        store: Connection to the store; not to be used elsewhere at the same time.
        timeout_seconds: Seconds, plus one, that an answer may take. May be set between two requests.
    """

    def __init__(self, store: KeyValueStore, timeout_seconds: float) -> None:
        self.underlying_store = store
        self.timeout_seconds = timeout_seconds
        self._thread: _StoreThread | None = None
        self._silent = ""

    def set(self, key: str, value: bytes, /) -> None:
        """Set a key."""
        self.ask(self.underlying_store.set, key, value)

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; return the new count."""
        return int(self.ask(self.underlying_store.add, key, amount))

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys are in the store."""
        return bool(self.ask(self.underlying_store.check, keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key to `desired` if its value is `expected`; return its value."""
        return bytes(self.ask(self.underlying_store.compare_set, key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; return whether it was in the store."""
        return bool(self.ask(self.underlying_store.delete_key, key))

    def ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        """Make a request in the connection's thread. Raises RuntimeError if the answer is late or an error."""
        if self._silent:
            raise RuntimeError(self._silent)
        thread = self._thread
        if thread is None or not thread.is_alive():  # a fork's child has the object without the thread
            try:
                thread = self._thread = _StoreThread(self)
            except (RuntimeError, MemoryError):  # no thread can be started here: other ranks must not notice
                return request(*arguments)
        answers: _Answers = queue.SimpleQueue()
        thread.requests.put((request, arguments, answers))
        seconds = self.timeout_seconds + _MARGIN_SECONDS
        try:
            answer, error = answers.get(timeout=min(seconds, _SILENT_SECONDS))
        except queue.Empty:
            if seconds > _SILENT_SECONDS:
                _log.warning(
                    "the store over which the ranks coordinate has not answered for %d s: the process that hosts it, "
                    "mostly rank 0, is stopped or overloaded, or its host is gone; waiting for at most %d s",
                    _SILENT_SECONDS,
                    seconds,
                )
            try:
                answer, error = answers.get(timeout=min(max(0.0, seconds - _SILENT_SECONDS), threading.TIMEOUT_MAX))
            except queue.Empty:
                self._silent = f"it has not answered for {seconds:g} s"
                raise RuntimeError(self._silent) from None
        if error is None:
            return answer
        try:
            raise error
        finally:
            del error  # its traceback leads to this frame

    def rest(self) -> None:
        """End the thread, until the next request."""
        thread, self._thread = self._thread, None
        if thread is not None and not self._silent:
            thread.end()
            thread.join(_EXIT_SECONDS)


class StoreWire:
    """Keys of a `torch.distributed` store under a prefix: values of any size, counters, and keys that are set once.

    All methods raise `CoordinatorLostError` if the store does not answer. No other thread may use `store`. The more
    ranks poll it (`world_size`), the less often each does.
    """

    def __init__(self, store: KeyValueStore, prefix: str, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._first_pause_seconds = max(_FIRST_PAUSE_SECONDS, world_size / _POLLS_PER_SECOND)
        last_pause = _LAST_PAUSE_SECONDS * max(1.0, world_size / _RANKS_PER_LAST_PAUSE)
        self._last_pause_seconds = min(last_pause, _LONGEST_PAUSE_SECONDS)

    def put(self, key: str, data: bytes) -> list[str]:
        """Set a key to bytes of any size; return all keys that hold its chunks, `key` last."""
        with guard_store(key):
            if len(data) <= CHUNK_BYTES:
                self._store.set(self._prefix + key, _WHOLE + data)
                return [key]
            starts = range(0, len(data), CHUNK_BYTES)
            parts = [f"{key}/{number}" for number in range(len(starts))]
            for part, start in zip(parts, starts, strict=True):
                self._store.set(self._prefix + part, data[start : start + CHUNK_BYTES])
            self._store.set(self._prefix + key, _CHUNKED + str(len(parts)).encode())
            return [*parts, key]

    def get(self, key: str) -> tuple[bytes, list[str]]:
        """Return the bytes that `put` set, and all keys that hold its chunks.

        Raises:
            CoordinatorLostError: Another rank has deleted the key.
        """
        found = self.find(key)
        if found is None:
            raise self._absent(key)
        return found

    def find(self, key: str) -> tuple[bytes, list[str]] | None:
        """Do as `get`; return None if the key or a chunk is missing."""
        head = self._read(key)
        if head is None or head[:1] == _WHOLE:
            return None if head is None else (head[1:], [key])
        parts = [f"{key}/{number}" for number in range(int(head[1:]))]
        chunks = [chunk for part in parts if (chunk := self._read(part)) is not None]
        return (b"".join(chunks), [*parts, key]) if len(chunks) == len(parts) else None

    def get_text(self, key: str) -> str:
        """Return the text that `claim` has set. Raises CoordinatorLostError if it is missing."""
        found = self._read(key)
        if found is None:
            raise self._absent(key)
        return found.decode()

    def _absent(self, key: str) -> CoordinatorLostError:
        return CoordinatorLostError(f"the key {key!r} is not in the store over which the ranks coordinate")

    def _read(self, key: str) -> bytes | None:
        # `get` would wait for the store's timeout if another rank has deleted the key.
        with guard_store(key):
            data = self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT)
        return None if data == _ABSENT.encode() else data

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter, which is 0 at first; return the new count."""
        with guard_store(key):
            return self._store.add(self._prefix + key, amount)

    def claim(self, key: str, text: str) -> str:
        """Set a key to a short ASCII text unless it is set; return its text."""
        with guard_store(key):
            return self._store.compare_set(self._prefix + key, "", text).decode()

    def has(self, *keys: str) -> bool:
        """Return whether all keys are in the store."""
        with guard_store(keys[0]):
            return self._store.check([self._prefix + key for key in keys])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete keys; missing ones are ignored."""
        with guard_store("(deleting keys)"):
            for key in keys:
                self._store.delete_key(self._prefix + key)

    def wait(self, ready: Callable[[], bool], deadline: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Poll `ready` until it is true; return False once `deadline` (of `time.monotonic`) has passed."""
        started = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(self._last_pause_seconds, max(self._first_pause_seconds, (now - started) / 20), deadline - now)
            sleep(pause)
        return True


@contextmanager
def guard_store(key: str) -> Iterator[None]:
    """Turn store errors into `CoordinatorLostError`, with `key` in the message."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError, and what stores without errors of their own raise
        message = str(error).partition("\n")[0]
        raise CoordinatorLostError(
            f"the store over which the ranks coordinate cannot be reached (at key {key!r}: {message}); the process "
            "that hosts it has most likely ended, or is stopped"
        ) from error


def keep_lease(connection: socket.socket, peer_timeout_seconds: float) -> None:
    """End a connection to a silent host, busy or idle, so that its rank raises within this time."""
    # The kernel's timers are up to an eighth late.
    silent_seconds = max(0.5 * peer_timeout_seconds, 0.9 * peer_timeout_seconds - _UNTIL_TOLD_SECONDS)
    probe_seconds = min(max(1, round(peer_timeout_seconds / _PROBES)), _MOST_SECONDS)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": probe_seconds,
        "TCP_KEEPINTVL": probe_seconds,
        "TCP_USER_TIMEOUT": round(silent_seconds * 1000),
    }
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every system has every option
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def open_leased(make: Callable[[], KeyValueStore], peer_timeout_seconds: float) -> KeyValueStore:
    """Open a connection to a store, which breaks if the store's host does not answer for so long."""
    before = _sockets()
    made = make()
    server = innermost_store(made)
    if not isinstance(server, dist.TCPStore):  # type: ignore[attr-defined]
        return made
    for inode, descriptor in _sockets().items():  # torch does not tell its socket
        if inode not in before:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                if found.family != socket.AF_UNIX and found.getpeername()[1] == server.port:
                    keep_lease(found, peer_timeout_seconds)
    return made


def _sockets() -> dict[str, int]:
    found = {}
    for path in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):  # another thread has closed it meanwhile
            if (inode := os.readlink(path)).startswith("socket:"):
                found[inode] = int(os.path.basename(path))
    return found


def connect_store(
    host: str, port: int, peer_timeout_seconds: float = DEFAULT_PEERS.peer_timeout_seconds
) -> KeyValueStore:
    """Connect to a running `TCPStore`, as `open_leased` does. Raises RuntimeError if no server answers."""
    torch_store: Any = dist.TCPStore  # type: ignore[attr-defined]
    make = partial(torch_store, host, port, None, False, timeout=STORE_TIMEOUT, wait_for_workers=False)
    return open_leased(make, peer_timeout_seconds)


def prefixed_store(prefix: str, store: Any) -> KeyValueStore:
    """Return a view of `store` that adds a prefix to each key."""
    made: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return cast("KeyValueStore", made)


def innermost_store(store: Any) -> Any:
    """Return the store inside all `PrefixStore`s."""
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    return store


def encode(value: Any) -> bytes:
    """Pickle a Python object for another rank of the same job."""
    return pickle.dumps(value, protocol=5)


def decode(data: bytes | bytearray) -> Any:
    """Unpickle bytes from another rank of the same job. Unsafe for bytes from any other source."""
    return pickle.loads(data)


class _StoreThread(threading.Thread):
    def __init__(self, store: TimedStore) -> None:
        super().__init__(name="dcp-store", daemon=True)
        self.requests: _Requests = queue.SimpleQueue()
        self.end = weakref.finalize(store, self.requests.put, None)
        """End the thread after the requests so far, or when the connection is dropped."""
        try:
            self.start()
        except BaseException:
            self.end.detach()
            raise
        _threads.add(self)

    def run(self) -> None:
        while (asked := self.requests.get()) is not None:
            request, arguments, answers = asked
            try:
                answers.put((request(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
                answers.put((None, error))
            del asked, request, arguments, answers  # the caller's values must not live until the next request


_threads: weakref.WeakSet[_StoreThread] = weakref.WeakSet()


def _end_threads() -> None:
    """End all threads; stop those with an unanswered request for good."""
    for thread in [*_threads]:
        thread.end()
    until = time.monotonic() + _EXIT_SECONDS
    for thread in [*_threads]:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = [thread.ident for thread in _threads if thread.is_alive() and thread.ident is not None]
    numbers = range(signal.SIGRTMAX, signal.SIGRTMIN, -1)
    number = next((each for each in numbers if signal.getsignal(each) == signal.SIG_DFL), None)
    if stuck and number is not None:
        libc = ctypes.CDLL(None)
        libc.signal(number, libc.pause)  # a handler that never returns
        for ident in stuck:
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                signal.pthread_kill(ident, number)


atexit.register(_end_threads)
