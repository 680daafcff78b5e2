"""Main program of a worker process, which exits as soon as the trainer ends or is killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from dcp_async.savers.worker_messages import Beat, Failed, Hello, Ready, read_message, send_message

_HEARTBEAT_SECONDS = 1.0


class Trainer:
    """The worker's connection to the trainer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.heeded = True
        """False after an error."""
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, message: object) -> None:
        """Send a message; exit the process if the trainer has ended."""
        with self._lock:
            try:
                send_message(self._connection, message)
            except OSError:
                os._exit(1)

    def listen(self, parent: int) -> None:
        """Queue the trainer's messages; exit when its process ends, even if forks keep the socket open."""
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(_watch(parent), select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in poller.poll()]
            if self._connection.fileno() not in ready:
                os._exit(1)
            try:
                message = read_message(self._connection)
            except pickle.UnpicklingError as error:
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
        """Send an error, and ignore later messages."""
        self.heeded = False
        _report(self, error)

    def beat(self) -> None:
        """Send heartbeats until the process ends."""
        pause = threading.Event()
        while True:
            self.send(Beat())
            pause.wait(_HEARTBEAT_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Handle messages until the trainer ends; the arguments are the socket's descriptor and the trainer's pid."""
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

        _lower_priority(hello)
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
    from dcp_ranks.phases.phases import failure_of  # noqa: PLC0415

    trainer.send(Failed(0, failure_of(0, error)))


def _watch(parent: int) -> int:
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    if os.getppid() != parent:
        os._exit(1)
    return watched


def _settle(hello: Hello) -> None:
    sys.path[:] = [*hello.sys_path]
    options = hello.options
    os.environ["OMP_NUM_THREADS"] = str(options.torch_threads)
    if options.cpu_affinity is not None:
        os.sched_setaffinity(0, options.cpu_affinity)


def _lower_priority(hello: Hello) -> None:
    """Lower the priority after the imports, which next to busy processes would take minutes."""
    options = hello.options
    os.nice(options.nice)
    if options.batch:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if options.ionice is not None:
        import psutil  # noqa: PLC0415

        kind, level = options.ionice
        best_effort = kind == "best-effort"
        name = psutil.IOPRIO_CLASS_BE if best_effort else psutil.IOPRIO_CLASS_IDLE
        psutil.Process().ionice(name, level if best_effort else None)
