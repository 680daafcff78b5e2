"""`RankPool`: real rank processes for tests, kept between tests because starting torch takes seconds."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any, TypeAlias, TypeVar

import cloudpickle

from dcp_ranks.errors import RanksError
from dcp_ranks.testing.rank_messages import Call, Done, Gone, Join, Raised
from dcp_ranks.testing.rank_starter import shared_starter

__all__ = ["RankError", "RankFailure", "RankPool"]

R = TypeVar("R")

Reply: TypeAlias = Done | Raised | Gone

_START_TIMEOUT_SECONDS = 120.0
_SHOWN_BYTES = 16 << 10
_ABORT_TIMEOUT_SECONDS = 20.0
# Threads of groups that PyTorch's caches keep wake 100 times a second each.
_MAX_THREADS = 40


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's failure: description, exception (None if not picklable), output."""

    text: str
    exception: BaseException | None
    output: str


class RankError(RanksError, RuntimeError):
    """A function that `RankPool.run` called failed on at least one rank.

    `failures` maps failed ranks to their failures, `outputs` the other ranks to their stdout and stderr.
    """

    def __init__(self, what: str, failures: Mapping[int, RankFailure], outputs: Mapping[int, str]) -> None:
        self.failures = dict(sorted(failures.items()))
        parts = [f"{what} failed on rank {', '.join(map(str, self.failures))}"]
        for rank, failure in self.failures.items():
            parts.append(f"--- rank {rank} ---\n{failure.text.rstrip()}")
            if failure.output.strip():
                parts.append(f"--- output of rank {rank} ---\n{failure.output.rstrip()}")
        parts += [f"--- output of rank {rank} ---\n{text.rstrip()}" for rank, text in outputs.items() if text.strip()]
        super().__init__("\n".join(parts))


class RankPool:
    """Pool of rank processes on this machine that runs functions on every rank of a process group.

    Processes are kept between calls, stopped (SIGSTOP) until the next one; a dead or stuck one is replaced. Each call
    starts with torch's seed 0, the caller's warning filters, and the initial environment and directory. The process
    group is kept for calls with the same world size and backend, and replaced after a failed call. With it processes
    are replaced that keep many threads.

    Args:
        max_ranks: Largest world size.
        timeout_seconds: Default timeout of a call.
        grace_seconds: Seconds that the other ranks have to finish after one rank has failed.
        setup: Function that each process calls before its first process group.
    """

    def __init__(
        self,
        max_ranks: int = 4,
        *,
        timeout_seconds: float = 60.0,
        grace_seconds: float = 10.0,
        setup: Callable[[], object] | None = None,
    ) -> None:
        self._max_ranks = max_ranks
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._setup = setup
        self._processes: dict[int, _RankProcess] = {}
        self._group: tuple[int, str | None] | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., R],
        *args: Any,
        timeout_seconds: float | None = None,
        kill_after_seconds: Mapping[int, float] | None = None,
        expect_death: Collection[int] = (),
        backend: str | None = "gloo",
    ) -> list[R]:
        """Call `function(*args)` on each rank of the default process group; return the results in rank order.

        Args:
            world_size: Number of ranks.
            function: Any function that cloudpickle can pickle.
            args: Its arguments.
            timeout_seconds: Seconds after which unfinished ranks are ended and reported with their stacks; None for the
                pool's.
            kill_after_seconds: Rank → seconds after which its process is killed (SIGKILL).
            expect_death: Ranks that must end before `function` returns; their results are None.
            backend: Backend such as `gloo` or `cpu:gloo,cuda:nccl`; None for no group.

        Raises:
            RankError: The function raised on some rank, took too long, or a process ended unexpectedly.
        """
        if not 1 <= world_size <= self._max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool has 1 to {self._max_ranks} ranks")
        self._start(world_size, is_new_group=self._group != (world_size, backend))
        processes = [self._processes[rank] for rank in range(world_size)]
        timeout_seconds = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            self._join(world_size, backend)
            call = _call(function, args)
            for rank, process in enumerate(processes):
                process.mark_output()
                process.send(call)
                if kill_after_seconds is not None and rank in kill_after_seconds:
                    process.kill_after(kill_after_seconds[rank])
            replies = self._collect(world_size, timeout_seconds, expected=frozenset(expect_death))
        finally:
            for process in processes:
                process.keep()
                process.send_signal(signal.SIGSTOP)
        return self._results(getattr(function, "__qualname__", repr(function)), replies, expect_death)

    __call__ = run

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._group = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world_size: int, *, is_new_group: bool) -> None:
        for rank in range(world_size):
            process = self._processes.get(rank)
            if process is not None and not (process.alive and (not is_new_group or process.has_few_threads)):
                process.close()
                process = None
                self._group = None
            if process is None:
                self._processes[rank] = process = _RankProcess()
                if self._setup is not None:
                    process.send(_call(self._setup, ()))
                    self._results("the setup of a rank", {rank: self._read(rank)}, ())
            else:
                process.send_signal(signal.SIGCONT)

    def _join(self, world_size: int, backend: str | None) -> None:
        if self._group == (world_size, backend):
            return
        self._group = None
        if backend is None:
            self._tell(Join(rank, world_size, None, None, self._timeout_seconds) for rank in range(world_size))
        else:
            self._tell([Join(0, world_size, backend, None, self._timeout_seconds)])
            (port,) = self._results("starting the process group's store", {0: self._read(0)}, ())
            self._tell(Join(rank, world_size, backend, port, self._timeout_seconds) for rank in range(1, world_size))
        replies = self._collect(world_size, max(self._timeout_seconds, _START_TIMEOUT_SECONDS), expected=frozenset())
        self._results("joining the process group", replies, ())
        self._group = (world_size, backend)

    def _tell(self, messages: Iterable[Join]) -> None:
        for message in messages:
            self._processes[message.rank].mark_output()
            self._processes[message.rank].send(message)

    def _collect(self, world_size: int, timeout_seconds: float, *, expected: Collection[int]) -> dict[int, Reply]:
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            for rank in range(world_size):
                selector.register(self._processes[rank].connection, selectors.EVENT_READ, rank)
            while len(replies) < world_size:
                # Poll once more after the deadline: replies that arrived in time count even if this process runs late.
                found = selector.select(max(0.0, deadline - time.monotonic()))
                if not found and time.monotonic() >= deadline:
                    break
                for key, _ in found:
                    rank = key.data
                    selector.unregister(key.fileobj)
                    replies[rank] = self._read(rank)
                    if not isinstance(replies[rank], Done) and rank not in expected:
                        deadline = min(deadline, time.monotonic() + self._grace_seconds)
        for rank in range(world_size):
            if rank not in replies:
                self._processes[rank].abort()
                replies[rank] = Raised("did not finish in time; its output shows where it was\n", None)
        return replies

    def _read(self, rank: int) -> Reply:
        try:
            reply: Reply = self._processes[rank].connection.recv()
        except (EOFError, ConnectionError):
            return Gone(f"the process {self._processes[rank].how_it_ended()}\n")
        return reply

    def _results(self, what: str, replies: Mapping[int, Reply], expect_death: Collection[int]) -> list[Any]:
        results: list[Any] = []
        failures: dict[int, RankFailure] = {}
        for rank, reply in sorted(replies.items()):
            result, failure = self._judge(rank, reply, dies=rank in expect_death)
            results.append(result)
            if failure is not None:
                failures[rank] = failure
        if failures or expect_death:
            self._group = None
        if failures:
            outputs = {rank: self._processes[rank].output() for rank in replies if rank not in failures}
            causes = [failure.exception for failure in failures.values() if failure.exception is not None]
            raise RankError(what, failures, outputs) from (causes[0] if causes else None)
        return results

    def _judge(self, rank: int, reply: Reply, *, dies: bool) -> tuple[Any, RankFailure | None]:
        process = self._processes[rank]
        if dies:
            if isinstance(reply, Gone):
                return None, None
            return None, RankFailure("was expected to die, but did not\n", None, process.output())
        if isinstance(reply, Done):
            try:
                return cloudpickle.loads(reply.result), None
            except Exception as error:  # noqa: BLE001 - unpickling runs the result's own code
                return None, RankFailure(f"its result cannot be unpickled: {error!r}\n", error, process.output())
        exception = None
        if isinstance(reply, Raised) and reply.exception is not None:
            with contextlib.suppress(Exception):
                exception = cloudpickle.loads(reply.exception)
        return None, RankFailure(reply.text, exception, process.output())


class _RankProcess:
    def __init__(self) -> None:
        ours, theirs = Pipe()
        self.connection = ours
        self._output = tempfile.TemporaryFile(prefix="dcp-rank-")  # noqa: SIM115 - open as long as the process
        self._shown_from = 0
        with theirs:
            self._process = shared_starter().start(theirs.fileno(), self._output.fileno())
        self._kill_timer: threading.Timer | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def has_few_threads(self) -> bool:
        try:
            return len(os.listdir(f"/proc/{self._process.pid}/task")) <= _MAX_THREADS
        except FileNotFoundError:  # it has just ended
            return False

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def send(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):
            self.connection.send(message)

    def mark_output(self) -> None:
        self._shown_from = os.fstat(self._output.fileno()).st_size

    def output(self) -> str:
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._shown_from, size - _SHOWN_BYTES)
        return os.pread(self._output.fileno(), size - start, start).decode(errors="replace")

    def kill_after(self, seconds: float) -> None:
        self._kill_timer = threading.Timer(seconds, self._process.kill)
        self._kill_timer.start()

    def keep(self) -> None:
        if self._kill_timer is not None:
            self._kill_timer.cancel()
            self._kill_timer = None

    def how_it_ended(self) -> str:
        try:
            code = self._process.wait(_ABORT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection, but is still running"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"

    def abort(self) -> None:
        """End a stuck process with SIGABRT, on which it prints its stacks."""
        self.send_signal(signal.SIGCONT)
        self.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ABORT_TIMEOUT_SECONDS)
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.keep()
        self.connection.close()
        self._process.kill()
        self._process.wait()
        self._output.close()


def _call(function: Callable[..., Any], args: Sequence[Any]) -> Call:
    return Call(
        cloudpickle.dumps((function, args)),
        cloudpickle.dumps(list(warnings.filters)),
        tuple(entry for entry in sys.path if entry),
        _own_modules(),
    )


def _own_modules() -> dict[str, str]:
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages()]
    installed = tuple(f"{path}{os.sep}" for path in paths)
    found = {}
    for name, module in sys.modules.copy().items():  # threads may import
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(installed) and name != "__main__":
            found[name] = file
    return found
