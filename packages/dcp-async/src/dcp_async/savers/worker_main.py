"""Main program of a saver's worker process.

The worker imports its modules while the trainer continues, saves on request from memory that it shares with the
trainer, and exits as soon as the trainer ends, even if the trainer is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from dcp_async.savers.worker_messages import Beat, Failed, Hello, NotUnderstoodError, Ready, read_message, send_message

__all__ = ["main"]

_BEAT_SECONDS = 1.0


class Trainer:
    """Connection of the worker process to the trainer.

    Args:
        connection: Socket to the trainer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.heeded = True
        """Whether the trainer's messages are still handled; False after the handling of a message has failed."""
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        """Send a message to the trainer; exits the worker process if the trainer has ended."""
        with self._lock:
            try:
                send_message(self._connection, message)
            except OSError:
                os._exit(1)

    def listen(self, parent: int) -> None:
        """Receive the trainer's messages into a queue, and exit the worker process when the trainer has ended.

        The trainer's process is watched as well as the socket, because a process forked by the trainer may keep the
        socket open.

        Args:
            parent: Process id of the trainer.
        """
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(_watch(parent), select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._connection.fileno() not in ready:
                os._exit(1)
            try:
                message = read_message(self._connection)
            except NotUnderstoodError as error:
                self.refuse(error.__cause__ or error)
                continue
            except (EOFError, OSError):
                os._exit(0)
            except BaseException as error:  # noqa: BLE001 - no memory: what follows in the socket is not known
                self.refuse(error)
                os._exit(1)
            if self.heeded:
                self.messages.put(message)

    def refuse(self, error: BaseException) -> None:
        """Send the trainer the error of a message to which no answer is expected, and ignore all later messages."""
        self.heeded = False
        _report(self, error)

    def beat(self) -> None:
        """Send heartbeats to the trainer until the worker process ends."""
        pause = threading.Event()
        while True:
            self.send(Beat())
            pause.wait(_BEAT_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Run the worker: handle the trainer's messages from a socket until the trainer ends.

    Args:
        arguments: File descriptor of the socket, and process id of the trainer, as texts.
    """
    descriptor, parent = map(int, arguments)
    # Both are for the trainer, which may want a last save before it ends; this process ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = Trainer(socket.socket(fileno=descriptor))
    threading.Thread(target=trainer.listen, args=(parent,), daemon=True).start()
    hello = trainer.messages.get()
    threading.Thread(target=trainer.beat, daemon=True).start()
    try:
        _settle(hello)
        from dcp_async.savers.worker_save import WorkerSaves  # noqa: PLC0415 - imports torch, after the first sign of life

        saves = WorkerSaves(trainer.send, hello)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        _report(trainer, error)
        os._exit(1)
    trainer.send(Ready())
    while True:
        message = trainer.messages.get()
        if not trainer.heeded:
            continue
        try:
            saves.handle(message)
        except BaseException as error:  # noqa: BLE001 - the trainer raises it
            trainer.refuse(error)


def _report(trainer: Trainer, error: BaseException) -> None:
    from dcp_ranks import failure_of  # noqa: PLC0415

    trainer.send(Failed(0, failure_of(0, error)))


def _watch(parent: int) -> int:
    """Return a descriptor that becomes readable when the trainer has ended."""
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    return watched


def _settle(hello: Hello) -> None:
    """Set this process's import path, threads, CPU affinity and priorities from the trainer's options."""
    sys.path[:] = [*hello.sys_path]
    options = hello.options
    os.environ["OMP_NUM_THREADS"] = str(options.torch_threads)
    os.nice(options.nice)
    if options.batch:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if options.cpu_affinity is not None:
        os.sched_setaffinity(0, options.cpu_affinity)
    if options.ionice is not None:
        import psutil  # noqa: PLC0415

        kind, level = options.ionice
        best_effort = kind == "best-effort"
        name = psutil.IOPRIO_CLASS_BE if best_effort else psutil.IOPRIO_CLASS_IDLE
        psutil.Process().ionice(name, level if best_effort else None)
