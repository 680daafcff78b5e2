"""`RankPool`: real rank processes for tests, kept between tests because starting torch takes seconds.

Not for use outside tests. The program of a rank process is `dcp_ranks.testing.rank_worker`.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import site
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import cloudpickle

from dcp_ranks.errors import RanksError
from dcp_ranks.testing.rank_messages import Call, Done, Gone, Join, Raised
from dcp_ranks.testing.rank_process import RankProcess

__all__ = ["RankError", "RankFailure", "RankPool"]

R = TypeVar("R")

Reply: TypeAlias = Done | Raised | Gone

_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RankFailure:
    """Failure of one rank: description, exception (None if it could not be pickled), and stdout and stderr."""

    text: str
    exception: BaseException | None
    output: str


class RankError(RanksError, RuntimeError):
    """A function that `RankPool.run` called failed on at least one rank.

    Args:
        what: Description of the call that failed.
        failures: Failed rank → its failure.
        outputs: Rank → stdout and stderr, for the ranks that did not fail.
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
    """Pool of real rank processes on this machine that runs functions on every rank of a process group.

    Processes start when they are first needed, and are kept; a process that dies or gets stuck is replaced. Each call
    starts with torch's seed 0, the caller's warning filters, and the initial environment and working directory of the
    process. The process group is the default group, over loopback, with its store on rank 0; it is kept between calls
    with the same world size and backend, and replaced after a failed call.

    Args:
        max_ranks: Largest world size.
        timeout_seconds: Default timeout of a call in seconds.
        grace_seconds: Time in seconds that the other ranks have to finish after one rank has failed.
    """

    def __init__(self, max_ranks: int = 4, *, timeout_seconds: float = 60.0, grace_seconds: float = 10.0) -> None:
        self._max_ranks = max_ranks
        self._timeout_seconds = timeout_seconds
        self._grace_seconds = grace_seconds
        self._processes: dict[int, RankProcess] = {}
        self._group: tuple[int, str | None] | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., R],
        *args: Any,
        timeout: float | None = None,
        kill_after: Mapping[int, float] | None = None,
        expect_death: Collection[int] = (),
        backend: str | None = "gloo",
    ) -> list[R]:
        """Call `function(*args)` on each rank of the default process group; returns the results in rank order.

        Args:
            world_size: Number of ranks; the function gets its rank from `torch.distributed.get_rank()`.
            function: Function that cloudpickle can pickle, including functions of test modules, lambdas and closures.
            args: Arguments of the function, the same on each rank.
            timeout: Seconds after which unfinished ranks are ended, and reported with their stacks; None for the
                `timeout_seconds` of the pool.
            kill_after: Rank → seconds after which the process of that rank is killed (SIGKILL); None to kill none.
            expect_death: Ranks whose processes must end before `function` returns; their results are None.
            backend: Backend of the group, such as `gloo`, `nccl` or `cpu:gloo,cuda:nccl`; None for no group at all.

        Raises:
            RankError: The function raised on some rank, took too long, or a process ended unexpectedly.
            ValueError: `world_size` is not between 1 and `max_ranks`.
        """
        if not 1 <= world_size <= self._max_ranks:
            raise ValueError(f"world_size is {world_size}; this pool has 1 to {self._max_ranks} ranks")
        self._start(world_size)
        self._join(world_size, backend)
        processes = [self._processes[rank] for rank in range(world_size)]
        call = _call(function, args)
        for rank, process in enumerate(processes):
            process.mark_output()
            process.send(call)
            if kill_after is not None and rank in kill_after:
                process.kill_after(kill_after[rank])
        limit_seconds = self._timeout_seconds if timeout is None else timeout
        try:
            replies = self._collect(world_size, limit_seconds, expected=frozenset(expect_death))
        finally:
            for process in processes:
                process.keep()
        return self._results(getattr(function, "__qualname__", repr(function)), replies, expect_death)

    __call__ = run

    def close(self) -> None:
        """End all rank processes."""
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._group = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, world_size: int) -> None:
        for rank in range(world_size):
            process = self._processes.get(rank)
            if process is not None and not process.alive:
                process.close()
                process = None
                self._group = None
            if process is None:
                self._processes[rank] = RankProcess()

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
        replies = self._collect(world_size, max(self._timeout_seconds, _START_SECONDS), expected=frozenset())
        self._results("joining the process group", replies, ())
        self._group = (world_size, backend)

    def _tell(self, messages: Iterable[Join]) -> None:
        for message in messages:
            self._processes[message.rank].mark_output()
            self._processes[message.rank].send(message)

    def _collect(self, world_size: int, limit_seconds: float, *, expected: Collection[int]) -> dict[int, Reply]:
        """Return the replies of the ranks; ends processes that do not reply in time."""
        replies: dict[int, Reply] = {}
        deadline = time.monotonic() + limit_seconds
        with selectors.DefaultSelector() as selector:
            for rank in range(world_size):
                selector.register(self._processes[rank].connection, selectors.EVENT_READ, rank)
            while len(replies) < world_size:
                # Poll once more after the deadline: replies that have arrived count, however late this process gets to
                # run.
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
            reply: Reply = self._processes[rank].read()
        except EOFError:
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


def _call(function: Callable[..., Any], args: Sequence[Any]) -> Call:
    return Call(
        cloudpickle.dumps((function, args)),
        cloudpickle.dumps(list(warnings.filters)),
        tuple(entry for entry in sys.path if entry),
        _own_modules(),
    )


def _own_modules() -> dict[str, str]:
    """Return the files of loaded modules that belong neither to Python nor to an installed package."""
    paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *site.getsitepackages()]
    installed = tuple(f"{path}{os.sep}" for path in paths)
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(installed) and name != "__main__":
            found[name] = file
    return found
