"""`RankStarter`: a process that imports PyTorch once, and forks rank processes within milliseconds."""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_ranks.testing.rank_worker import die_with
from dcp_ranks.testing.rank_worker import main as run_rank

__all__ = ["RankStarter", "StartedRank", "main", "shared_starter"]

# Not `python -m`, which would search the working directory for every module first.
_STARTER = (
    "import sys; sys.path = [*filter(None, sys.path)]; "
    "from dcp_ranks.testing.rank_starter import main; main(sys.argv[1:])"
)
_MESSAGE_BYTES = 1 << 20
_POLL_SECONDS = 0.002
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}


class StartedRank:
    """Forked process, with methods as in `subprocess.Popen`."""

    def __init__(self, starter: RankStarter, pid: int) -> None:
        self._starter = starter
        self._code: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None."""
        if self._code is None:
            try:
                self._code = self._starter.ask("code", self.pid)
            except (EOFError, OSError):  # with the starter its children have been killed
                self._code = -signal.SIGKILL
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class RankStarter:
    """A child process that forks rank processes; all end with this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._lock = threading.Lock()
        self._owner = os.getpid()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _STARTER, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **_ENVIRONMENT},  # so that there are no threads before a fork
            )
        atexit.register(self.close)

    def start(self, connection: int, output: int) -> StartedRank:
        """Fork a rank process with these descriptors."""
        environment = {**os.environ, **_ENVIRONMENT}
        return StartedRank(self, self.ask("start", environment, os.getcwd(), descriptors=[connection, output]))

    def ask(self, *request: Any, descriptors: Sequence[int] = ()) -> Any:
        """Return the answer to a request. Raises EOFError if the starter has ended."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(request)], descriptors)
            answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise EOFError("the process that starts the ranks has ended")
        return pickle.loads(answer)

    @property
    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        if self._owner == os.getpid():
            self._socket.close()
            self._process.kill()
            self._process.wait()


_shared: list[RankStarter] = []
_shared_lock = threading.Lock()


def shared_starter() -> RankStarter:
    """Return this process's starter; the first call starts it."""
    with _shared_lock:
        if not (_shared and _shared[-1].is_usable):
            _shared.append(RankStarter())
        return _shared[-1]


def main(arguments: Sequence[str]) -> None:
    """Run until the parent ends; `arguments`: socket's descriptor, parent's process id."""
    descriptor, parent = map(int, arguments)
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    server = socket.socket(fileno=descriptor)
    codes: dict[int, int] = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, _MESSAGE_BYTES, 2)
        if not message:
            os._exit(0)
        kind, *values = pickle.loads(message)
        if kind == "start":
            answer: Any = os.fork()
            if answer == 0:
                server.close()
                _become_rank(descriptors, *values)
            for one in descriptors:
                os.close(one)
        else:
            answer = _code_of(values[0], codes)
        server.send(pickle.dumps(answer))


def _become_rank(descriptors: Sequence[int], environment: Mapping[str, str], folder: str) -> None:
    try:
        connection, output = descriptors
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        run_rank([str(connection), str(os.getppid())])
    finally:
        os._exit(1)


def _code_of(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]
