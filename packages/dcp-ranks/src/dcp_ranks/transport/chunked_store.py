"""Values, claims and waits on a `torch.distributed` store: chunked, interruptible, with an error if the store is lost.

Waiting is polling with growing pauses: a blocking `wait` holds its connection, blocks the handling of signals, and
prints a warning at each timeout. The meaning of the keys, and the making of connections, are elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

from dcp_ranks.errors import ERROR_TYPES, CoordinatorLostError, ErrorTypes

__all__ = ["CHUNK_BYTES", "KeyValueStore", "StoreWire", "VanishedKeyError", "guard_store", "store_lost"]

# TCPStore drops the connection at more than 8 MiB; 1 MiB is where it is fastest.
CHUNK_BYTES = 1 << 20
_WHOLE, _CHUNKED = b"w", b"c"
_ABSENT = "dcp: nothing is stored here"
_FIRST_PAUSE_SECONDS = 0.0005
_LAST_PAUSE_SECONDS = 0.05
_RANKS_PER_LAST_PAUSE = 64
_POLLS_PER_SECOND = 10_000
"""Polling limit of all ranks together: a store must have time for requests with data."""


class KeyValueStore(Protocol):
    """The methods of `torch.distributed.Store` that are used here, with the same keys and values."""

    def set(self, key: str, value: bytes, /) -> None: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102
    def clone(self) -> KeyValueStore: ...  # noqa: D102
    def set_timeout(self, timeout: timedelta, /) -> None: ...  # noqa: D102


class VanishedKeyError(CoordinatorLostError):
    """A key that was in the store has been deleted."""


class StoreWire:
    """Values, counters and claims at a store, under a prefix; raises `CoordinatorLostError` if the store is lost.

    Args:
        store: Connection to the store, which no other thread uses.
        prefix: Prefix of every key.
        world_size: Number of ranks that poll this store; the more ranks, the less often each one polls.
        errors: Classes of the errors to raise.

    Example:
        ```python
        import torch.distributed as dist
        from dcp_ranks import StoreWire

        wire = StoreWire(dist.HashStore(), "settings/", world_size=1)
        wire.put("rate", b"3e-4")
        data, keys = wire.get("rate")
        assert data == b"3e-4"
        wire.delete(keys)
        ```
    """

    def __init__(self, store: KeyValueStore, prefix: str, world_size: int, *, errors: ErrorTypes = ERROR_TYPES) -> None:
        self.store = self._store = store
        self._errors = errors
        self._prefix = prefix
        self._first_pause_seconds = max(_FIRST_PAUSE_SECONDS, world_size / _POLLS_PER_SECOND)
        self._last_pause_seconds = _LAST_PAUSE_SECONDS * max(1.0, world_size / _RANKS_PER_LAST_PAUSE)

    def put(self, key: str, data: bytes) -> list[str]:
        """Store a value of any size; returns all keys that hold its chunks, the given key last."""
        with guard_store(key, self._errors):
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
        """Return an existing value, and all keys that hold its chunks."""
        head = self._read(key)
        if head[:1] == _WHOLE:
            return head[1:], [key]
        parts = [f"{key}/{number}" for number in range(int(head[1:]))]
        return b"".join([self._read(part) for part in parts]), [*parts, key]

    def get_text(self, key: str) -> str:
        """Return the text that `claim` set."""
        return self._read(key).decode()

    def _read(self, key: str) -> bytes:
        # Not `get`: it waits for a key that another rank has removed meanwhile, and for as long as the store's timeout.
        with guard_store(key, self._errors):
            data = self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT)
        if data == _ABSENT.encode():
            raise VanishedKeyError(f"the key {key!r} is not in the store over which the ranks coordinate")
        return data

    def mark(self, key: str) -> None:
        """Store an empty value."""
        self.put(key, b"")

    def add(self, key: str) -> int:
        """Add one to a counter that starts at 0; returns its new value."""
        with guard_store(key, self._errors):
            return self._store.add(self._prefix + key, 1)

    def count(self, key: str) -> int:
        """Return the value of a counter; 0 if it is not set."""
        with guard_store(key, self._errors):
            return self._store.add(self._prefix + key, 0)

    def claim(self, key: str, text: str) -> str:
        """Set a key unless another rank has set it; returns the text that the key then has. Short ASCII text only."""
        with guard_store(key, self._errors):
            return self._store.compare_set(self._prefix + key, "", text).decode()

    def has(self, *keys: str) -> bool:
        """Whether all of these keys are set."""
        with guard_store(keys[0], self._errors):
            return self._store.check([self._prefix + key for key in keys])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these keys, as far as they exist."""
        with guard_store("(deleting keys)", self._errors):
            for key in keys:
                self._store.delete_key(self._prefix + key)

    def wait(self, ready: Callable[[], bool], deadline: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Poll until `ready()`, or until `time.monotonic()` reaches the deadline; returns whether it became ready.

        `sleep(seconds)` waits between two polls, at most that many seconds.
        """
        started = time.monotonic()
        while not ready():
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(self._last_pause_seconds, max(self._first_pause_seconds, (now - started) / 20), deadline - now)
            sleep(pause)
        return True


@contextmanager
def guard_store(key: str, errors: ErrorTypes = ERROR_TYPES) -> Iterator[None]:
    """Raise `CoordinatorLostError` for errors of the store in the block; `key` names the request."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError, and what stores without errors of their own raise
        raise store_lost(key, error, errors) from error


def store_lost(key: str, error: RuntimeError, errors: ErrorTypes = ERROR_TYPES) -> CoordinatorLostError:
    """Return the error to raise for a store that does not answer."""
    message = str(error).partition("\n")[0]
    return errors.coordinator_lost(
        f"the store over which the ranks coordinate cannot be reached (at key {key!r}: {message}); the process that "
        "hosts it has most likely ended"
    )
