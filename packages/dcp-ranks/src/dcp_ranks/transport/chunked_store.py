"""`StoreWire`: keys of a `torch.distributed` store, with large values in chunks, and an error if the store is lost.

Waiting is polling with growing pauses, because the blocking `wait` of a store holds its connection, blocks the handling
of signals, and prints a warning at each timeout. Not in this module: the meaning of the keys, opening connections.
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
    """The methods of `torch.distributed.Store` that coordinators need."""

    def set(self, key: str, value: bytes, /) -> None: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102
    def clone(self) -> KeyValueStore: ...  # noqa: D102
    def set_timeout(self, timeout: timedelta, /) -> None: ...  # noqa: D102


class VanishedKeyError(CoordinatorLostError):
    """A key that should be in the store is missing: another rank has deleted it."""


class StoreWire:
    """Keys of a `torch.distributed` store under a prefix: values of any size, counters, and keys that are set once.

    All methods raise `CoordinatorLostError` if the store does not answer any more.

    Args:
        store: Connection to the store; no other thread may use it.
        prefix: Prefix of every key.
        world_size: Number of ranks that poll the store; with more ranks, each rank polls less often.
        errors: Exception classes to raise.

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
        """Set a key to bytes of any size; returns all keys that hold chunks of the bytes, `key` last."""
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
        """Return the bytes that `put` stored under a key, and all keys that hold chunks of these bytes.

        Raises:
            VanishedKeyError: The key is not in the store.
        """
        head = self._read(key)
        if head[:1] == _WHOLE:
            return head[1:], [key]
        parts = [f"{key}/{number}" for number in range(int(head[1:]))]
        return b"".join([self._read(part) for part in parts]), [*parts, key]

    def get_text(self, key: str) -> str:
        """Return the text of a key that `claim` has set. Raises VanishedKeyError if the key is not in the store."""
        return self._read(key).decode()

    def _read(self, key: str) -> bytes:
        # Not `get`: it waits for a key that another rank has removed meanwhile, and for as long as the store's timeout.
        with guard_store(key, self._errors):
            data = self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT)
        if data == _ABSENT.encode():
            raise VanishedKeyError(f"the key {key!r} is not in the store over which the ranks coordinate")
        return data

    def mark(self, key: str) -> None:
        """Set a key to an empty value, as a flag."""
        self.put(key, b"")

    def add(self, key: str) -> int:
        """Add 1 to the counter in a key, which starts at 0; returns the new count."""
        with guard_store(key, self._errors):
            return self._store.add(self._prefix + key, 1)

    def count(self, key: str) -> int:
        """Return the count of the counter in a key; 0 if nothing was added."""
        with guard_store(key, self._errors):
            return self._store.add(self._prefix + key, 0)

    def claim(self, key: str, text: str) -> str:
        """Set a key to a short ASCII text unless the key is set already; returns the text that the key now has."""
        with guard_store(key, self._errors):
            return self._store.compare_set(self._prefix + key, "", text).decode()

    def has(self, *keys: str) -> bool:
        """Return whether all of these keys are in the store."""
        with guard_store(keys[0], self._errors):
            return self._store.check([self._prefix + key for key in keys])

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these keys; keys that do not exist are ignored."""
        with guard_store("(deleting keys)", self._errors):
            for key in keys:
                self._store.delete_key(self._prefix + key)

    def wait(self, ready: Callable[[], bool], deadline: float, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Poll `ready` until it returns true or the deadline has passed; returns False at the deadline.

        Args:
            ready: Function that returns whether to stop waiting.
            deadline: Time of `time.monotonic()` at which to give up, in seconds.
            sleep: Function that waits between two polls, at most as many seconds as its argument.
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
    """Context manager that turns errors of the store in the block into `CoordinatorLostError`.

    Args:
        key: Key or description of the request, for the error message.
        errors: Exception classes to raise.
    """
    try:
        yield
    except RuntimeError as error:  # DistNetworkError, and what stores without errors of their own raise
        raise store_lost(key, error, errors) from error


def store_lost(key: str, error: RuntimeError, errors: ErrorTypes = ERROR_TYPES) -> CoordinatorLostError:
    """Return the exception to raise when the store does not answer to a request for a key."""
    message = str(error).partition("\n")[0]
    return errors.coordinator_lost(
        f"the store over which the ranks coordinate cannot be reached (at key {key!r}: {message}); the process that "
        "hosts it has most likely ended, or is stopped"
    )
