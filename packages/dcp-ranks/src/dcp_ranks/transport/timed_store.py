"""`TimedStore`: a connection to a `torch.distributed` store whose requests fail if the store does not answer in time.

A `TCPStore` waits for an answer for ever, in native code, if the process that serves it is stopped or its host is cut
off. So each connection has a thread that makes the requests, and callers wait for the thread. Not in this module: the
meaning of the keys, opening connections.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from dcp_ranks.transport.chunked_store import KeyValueStore

__all__ = ["TimedStore"]

_Answers = queue.SimpleQueue[tuple[Any, BaseException | None]]
_Requests = queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], _Answers] | None]

_MARGIN_SECONDS = 1.0
"""What an answer may take beyond the timeout: a machine under load is no reason to give up a short one."""


class TimedStore:
    """Connection to a store, each request over which is answered in time or raises RuntimeError.

    After a request that was not answered all others fail at once: the connection is still busy with the first.

    Args:
        store: Connection to the store; nothing else may use it meanwhile.
        timeout_seconds: Time in seconds, plus one, that an answer may take. May be set between two requests.

    Example:
        ```python
        import torch.distributed as dist
        from dcp_ranks import TimedStore

        store = TimedStore(dist.HashStore(), timeout_seconds=30)
        store.set("rate", b"3e-4")
        assert store.check(["rate"])
        ```
    """

    def __init__(self, store: KeyValueStore, timeout_seconds: float) -> None:
        self.underlying_store = store
        """The connection itself; see `innermost_store`."""
        self.timeout_seconds = timeout_seconds
        self._thread: threading.Thread | None = None
        self._requests: _Requests = queue.SimpleQueue()
        self._silent = ""

    def set(self, key: str, value: bytes, /) -> None:
        """Set a key."""
        self._ask(self.underlying_store.set, key, value)

    def add(self, key: str, amount: int, /) -> int:
        """Add to the counter in a key; returns the new count."""
        return int(self._ask(self.underlying_store.add, key, amount))

    def check(self, keys: list[str], /) -> bool:
        """Return whether all of these keys are in the store."""
        return bool(self._ask(self.underlying_store.check, keys))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a key to `desired` if it has the value `expected`; returns the value that it has now."""
        return bytes(self._ask(self.underlying_store.compare_set, key, expected, desired))

    def delete_key(self, key: str, /) -> bool:
        """Delete a key; returns whether it was in the store."""
        return bool(self._ask(self.underlying_store.delete_key, key))

    def clone(self) -> KeyValueStore:
        """Open a further connection to the store, with the same timeout."""
        return TimedStore(self._ask(self.underlying_store.clone), self.timeout_seconds)

    def set_timeout(self, timeout: timedelta, /) -> None:
        """Set the time that an answer may take."""
        self.timeout_seconds = timeout.total_seconds()

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        if self._silent:
            raise RuntimeError(self._silent)
        if self._thread is None or not self._thread.is_alive():  # a fork's child has the object without the thread
            self._start()
        answers: _Answers = queue.SimpleQueue()
        self._requests.put((request, arguments, answers))
        try:
            answer, error = answers.get(timeout=min(self.timeout_seconds + _MARGIN_SECONDS, threading.TIMEOUT_MAX))
        except queue.Empty:
            self._silent = f"it has not answered for {self.timeout_seconds + _MARGIN_SECONDS:g} s"
            raise RuntimeError(self._silent) from None
        if error is None:
            return answer
        try:
            raise error
        finally:
            del error  # its traceback leads to this frame

    def _start(self) -> None:
        self._requests = queue.SimpleQueue()
        weakref.finalize(self, self._requests.put, None)
        self._thread = threading.Thread(target=_serve, args=(self._requests,), name="dcp-store", daemon=True)
        self._thread.start()


def _serve(requests: _Requests) -> None:
    """Make the requests over one connection, one after the other, until None comes."""
    while (asked := requests.get()) is not None:
        request, arguments, answers = asked
        try:
            answers.put((request(*arguments), None))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
            answers.put((None, error))
        del asked, request, arguments, answers  # the caller's values must not live until the next request
