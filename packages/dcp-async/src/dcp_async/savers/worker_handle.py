"""Handle of a saver's worker process."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from dcp_async.errors import SaverDeadlineError, WorkerError, WorkerLostError
from dcp_async.options import WorkerOptions
from dcp_async.savers.worker_messages import (
    Beat,
    EventSent,
    Failed,
    Hello,
    Logged,
    Ready,
    Warned,
    read_message,
    send_message,
)
from dcp_base.hookspecs import CheckpointEvent
from dcp_base.logs import library_logger
from dcp_core import plugins
from dcp_core.calls import module_command
from dcp_core.events import LOGGER_NAME

_TERM_GRACE_SECONDS = 5.0
_KILL_GRACE_SECONDS = 5.0
_POLL_SECONDS = 1.0
"""Longest single wait; of a stop of this process (SIGSTOP), at most one counts."""
_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class WorkerProcess:
    """Handle of one worker process, which the constructor starts.

    A thread calls `on_end` when the process has ended by itself; `read` calls `on_event` with events of a save.
    `PYTHONPATH` is set to `sys.path`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        on_end: Callable[[], object],
        environment: Mapping[str, str] = os.environ,
        on_event: Callable[[CheckpointEvent], object] = plugins.emit,
    ) -> None:
        self._options = options
        self._on_event = on_event
        ours, theirs = socket.socketpair()
        self._connection = ours
        self.bytes_sent = 0
        self._ready = False
        self._closing = False
        self._given_up = False
        self._end_lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                module_command("dcp_async.savers.worker_main", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**environment, "PYTHONPATH": os.pathsep.join(_search_path())},
            )
        # Readable as soon as it has ended; `poll` reports the end only after the waiting thread has run.
        self._end = os.pidfd_open(self._process.pid)
        weakref.finalize(self, os.close, self._end)
        _open.add(ours)
        self._on_end = on_end
        # A worker without references ends by itself: the thread that waits for its end does not hold it.
        weakref.finalize(self, _shut, ours).atexit = False
        watch = (self._process, weakref.ref(self))
        threading.Thread(target=_watch, args=watch, name="dcp-worker-watch", daemon=True).start()
        level = library_logger(LOGGER_NAME).getEffectiveLevel()
        self.send(Hello(tuple(_search_path()), options, level))

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the worker is running and usable."""
        return not self._given_up and not self._ended()

    def wait_ready(self) -> None:
        """Wait until the worker is ready. Raises WorkerError."""
        if self._ready:
            return
        try:
            # There are no heartbeats yet: importing torch holds the interpreter.
            answer = self.read(time.monotonic() + self._options.start_timeout_seconds, starts=True)
        except (WorkerLostError, SaverDeadlineError) as error:
            self.close()
            raise WorkerError(f"the saver's process could not be started: {error}") from error
        if isinstance(answer, Failed):
            self.close()
            raise WorkerError(f"the saver's process could not be started:\n{answer.failure.text}")
        if not isinstance(answer, Ready):
            raise WorkerError(f"the saver's process sent {type(answer).__name__} when it should be ready")
        self._ready = True

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Send a message. Raises WorkerLostError if the worker has ended, or accepted no data and was killed."""
        try:
            self._connection.settimeout(self._options.heartbeat_timeout_seconds)
            self.bytes_sent += send_message(self._connection, message, descriptor)
            self._connection.settimeout(None)
        except TimeoutError as error:
            self.kill()
            raise WorkerLostError(self._silent("took no message")) from error
        except OSError as error:
            raise WorkerLostError(self._how_it_ended()) from error

    def read(self, deadline: float, *, starts: bool = False, meanwhile: Callable[[], object] | None = None) -> Any:
        """Return the worker's next answer; pass on events, log records and warnings before it.

        `meanwhile` is called every few seconds. A worker that sends no heartbeat (WorkerLostError), or no answer before
        `deadline` of `time.monotonic` (SaverDeadlineError), is killed.
        """
        limit = "start_timeout_seconds" if starts else "save_timeout_seconds"
        left = deadline - time.monotonic()
        silence = left if starts else self._options.heartbeat_timeout_seconds
        while True:
            heard, spent = self._listen(min(left, silence)) if left > 0 else (False, 0.0)
            left -= spent
            if left <= 0 and not heard:
                self.kill()
                raise SaverDeadlineError(f"the saver's process {self.pid} took longer than `{limit}`, and was ended")
            message = self._receive() if heard else None
            if message is None:
                self.kill()
                raise WorkerLostError(self._silent("gave no sign of life"))
            if isinstance(message, EventSent):
                self._on_event(message.event)
            elif not _pass_on(message):
                return message
            if meanwhile is not None:
                meanwhile()

    def _listen(self, seconds: float) -> tuple[bool, float]:
        """Return whether a message or the end came, and the time waited, without stops of the whole job."""
        spent = 0.0
        poller = select.poll()
        try:
            poller.register(self._connection, select.POLLIN)
        except ValueError:  # closed in another thread; reading raises
            return True, spent
        while spent < seconds:
            begun = time.monotonic()
            heard = bool(poller.poll(min(seconds - spent, _POLL_SECONDS) * 1000))
            spent += min(time.monotonic() - begun, _POLL_SECONDS)
            if heard:
                return True, spent
        return False, spent

    def _receive(self) -> Any:
        try:
            self._connection.settimeout(self._options.heartbeat_timeout_seconds)
            message = read_message(self._connection)
            self._connection.settimeout(None)
        except TimeoutError:
            return None
        except (EOFError, OSError) as error:  # OSError follows `close` in another thread
            raise WorkerLostError(self._how_it_ended()) from error
        return message

    def settle(self) -> None:
        """If the worker has ended by itself, wait for `on_end`."""
        if self._ended():
            self._report_end()

    def kill(self) -> None:
        """Kill the worker; a process that hangs in the kernel is abandoned."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            self._process.wait(_KILL_GRACE_SECONDS)
            self.settle()
        except subprocess.TimeoutExpired:
            library_logger(LOGGER_NAME).warning(
                "the saver's process %d was killed, but has not ended after %g s; another one takes its place",
                self.pid,
                _KILL_GRACE_SECONDS,
            )
            self._given_up = True
            self._report_end()

    def close(self) -> None:
        """Close the connection; the worker then exits by itself."""
        self._closing = True
        _shut(self._connection)
        if self._given_up:
            return
        try:
            self._process.wait(_TERM_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _report_end(self) -> None:
        """Call `on_end` once, unless `close` came first; concurrent callers wait."""
        with self._end_lock:
            wanted, self._closing = self._closing, True
            if not wanted:
                self._on_end()

    def _ended(self) -> bool:
        poller = select.poll()  # `select.select` takes no descriptor above 1023
        poller.register(self._end, select.POLLIN)
        return bool(poller.poll(0))

    def _silent(self, how: str) -> str:
        seconds = self._options.heartbeat_timeout_seconds
        return (
            f"the saver's process {self.pid} {how} for {seconds:g} s, and was ended; the next save starts another one"
        )

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_TERM_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return f"the saver's process {self.pid} closed its connection, and was ended"
        self.settle()  # after this call, ranks may rely on a new worker
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        hint = " (the kernel's log says whether it ran out of memory)" if code == -signal.SIGKILL else ""
        return f"the saver's process {self.pid} {how}{hint}; this save is lost, the next one starts another process"


def _watch(process: subprocess.Popen[bytes], worker: weakref.ref[WorkerProcess]) -> None:
    process.wait()
    if (watched := worker()) is not None:
        watched._report_end()  # noqa: SLF001 - it is this thread's owner


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # a thread that reads or sends wakes up
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _search_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]


def _pass_on(message: object) -> bool:
    if isinstance(message, Logged):
        logger = library_logger(message.logger)
        if logger.isEnabledFor(message.level):
            logger.handle(logger.makeRecord(message.logger, message.level, "", 0, message.text, (), None))
    elif isinstance(message, Warned):
        try:
            warnings.warn(message.text, pickle.loads(message.category), stacklevel=2)
        except Warning:  # turned into an error by a filter: the save has succeeded all the same
            library_logger(LOGGER_NAME).warning("%s", message.text)
    else:
        return isinstance(message, Beat)
    return True


def _close_in_child() -> None:
    """Close the connections, which would hide the trainer's end."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
