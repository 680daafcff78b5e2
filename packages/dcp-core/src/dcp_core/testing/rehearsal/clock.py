"""Virtual time: tasks are threads of which one runs at a time, until it waits; a seed orders simultaneous events.

A task waits in `Clock.wait` and `Clock.play` alone. The clock then jumps to the next event, so an hour of waiting takes
no time, and a run with the same seed repeats every step.
"""

from __future__ import annotations

import heapq
import math
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["Clock", "Resource", "Task"]

_STACK_BYTES = 1 << 20


class _Here(threading.local):
    task: Task | None = None


@dataclass(eq=False, slots=True)
class Task:
    """A simulated process."""

    number: int
    call: Callable[[], Any]
    whole: Task | None = None  # of a thread: its process
    parts: list[Task] = field(default_factory=list)
    result: Any = None
    error: BaseException | None = None
    dead: bool = False
    ended: bool = False
    waiting: int = 0
    moment: float = 0.0  # in `play`, and what follows
    moments: Iterator[float] = field(default_factory=lambda: iter(()))
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Locked unless the task may run."""

    def __post_init__(self) -> None:
        self.turn.acquire()


@dataclass(slots=True)
class Resource:
    """A device that serves one request after the other, such as a network card."""

    busy_seconds: float = 0.0
    free_at: float = 0.0

    def take(self, now: float, seconds: float) -> float:
        self.busy_seconds += seconds
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at


class Clock:
    """Scheduler of tasks."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.steps = 0
        self.at_step: dict[int, Callable[[], None]] = {}
        """Step → function that is called when that wait ends, such as a kill."""
        self._events: list[tuple[float, float, int, Task | Callable[[], None]]] = []
        self._numbers = 0
        self._here = _Here()
        self._all_ended = threading.Semaphore(0)
        self._left = 0

    def run(self, calls: Sequence[Callable[[], Any]], *, starts: Sequence[float] = ()) -> list[Task]:
        """Run each call in a task of its own until all have returned; calls start at `starts` seconds from now."""
        tasks = self.tasks = [Task(number, call) for number, call in enumerate(calls)]
        before = threading.stack_size(_STACK_BYTES)
        try:
            for task in tasks:
                self._start(task, starts[task.number] if starts else 0.0)
        finally:
            threading.stack_size(before)
        with self._installed():
            self._next().turn.release()
            self._all_ended.acquire()
        return tasks

    @property
    def task(self) -> Task | None:
        """The task that this thread runs."""
        return self._here.task

    def wait(self, seconds: float) -> None:
        """Wait in a task, until `wake` or for `seconds`. Raises SystemExit in a killed one."""
        task = self.task
        if task is None:  # code outside the simulation, such as the check of a result
            return
        self._check(task)
        self._schedule(task, self.now + max(0.0, seconds))
        self._switch(task)

    def play(self, moments: Iterator[float]) -> None:
        """Wait until each moment. The iterator never raises, and runs in any thread: switches of threads are slow."""
        task = self.task
        if task is None:
            deque(moments, 0)
            return
        task.moments = moments
        if self._plays(task):
            self._switch(task)
        self._check(task)

    def wait_until(self, moment: float) -> None:
        self.play(iter((moment,)))

    def pause(self, seconds: float) -> None:
        self.wait_until(self.now + seconds)

    def wake(self, task: Task) -> None:
        if not task.ended:
            self._schedule(task, self.now)

    def at(self, moment: float, call: Callable[[], None]) -> None:
        self._push(moment, call)

    def kill(self, task: Task) -> None:
        """End a task as a killed process ends: it changes nothing any more."""
        for each in (task, *task.parts):
            each.dead = not each.ended
            self.wake(each)

    def thread(self, target: Callable[..., Any], args: Sequence[Any], **options: Any) -> Any:
        # Code outside of the simulation gets a real thread.
        if self.task is None:
            return threading.Thread(target=target, args=args, **options)
        part = Task(self.task.number, partial(target, *args), whole=self.task)
        return SimpleNamespace(start=partial(self._start, part, 0.0), join=partial(self._join, part))

    def _start(self, task: Task, delay: float) -> None:
        if task.whole is not None:
            task.whole.parts.append(task)
        self._left += 1
        self._schedule(task, self.now + delay)
        threading.Thread(target=self._play, args=(task,), daemon=True).start()

    def _join(self, part: Task) -> None:
        while not part.ended:
            self.wait(math.inf)

    def _check(self, task: Task) -> None:
        if task.dead:
            raise SystemExit("killed")

    def _schedule(self, task: Task, moment: float) -> None:
        task.waiting = self._push(moment, task)

    def _push(self, moment: float, target: Task | Callable[[], None]) -> int:
        self._numbers += 1
        heapq.heappush(self._events, (moment, self.random.random(), self._numbers, target))
        return self._numbers

    def _plays(self, task: Task) -> bool:
        """Schedule a task's next moment in `play`; return whether there is one."""
        while task.moment <= self.now and not task.dead:
            if (moment := next(task.moments, None)) is None:
                return False
            task.moment = moment
        if not task.dead:
            self._schedule(task, self.now + (task.moment - self.now))
        return not task.dead

    def _switch(self, task: Task) -> None:
        following = self._next()
        if following is not task:
            following.turn.release()
            task.turn.acquire()
        self._check(task)

    def _next(self) -> Task:
        while True:
            moment, _, number, target = heapq.heappop(self._events)
            if isinstance(target, Task):
                if target.ended or target.waiting != number:
                    continue
                self.now = max(self.now, moment)
                self.steps += 1
                if (fault := self.at_step.pop(self.steps, None)) is not None:
                    fault()
                    if target.waiting != number:  # it was killed, and has another event
                        continue
                if self._plays(target):
                    continue
                return target
            self.now = max(self.now, moment)
            target()

    def _play(self, task: Task) -> None:
        self._here.task = task
        task.turn.acquire()
        try:
            self._check(task)
            task.result = task.call()
        except BaseException as error:  # noqa: BLE001 - the caller looks at it
            task.error = error
        task.ended = True
        self._left -= 1
        if task.whole is not None:
            self.wake(task.whole)
        if self._left:
            self._next().turn.release()
        else:
            self._all_ended.release()

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """In tasks, `time` and `secrets` are the clock's."""
        monotonic, now, now_ns, sleep, draw = time.monotonic, time.time, time.time_ns, time.sleep, secrets.token_bytes

        def drawn(nbytes: int | None = None) -> bytes:
            return draw(nbytes) if self.task is None else self.random.randbytes(nbytes or 32)

        changes: dict[tuple[Any, str], Callable[..., Any]] = {
            (time, "monotonic"): lambda: monotonic() if self.task is None else self.now,
            (time, "time"): lambda: now() if self.task is None else self.now,
            (time, "time_ns"): lambda: now_ns() if self.task is None else int(self.now * 1e9),
            (time, "sleep"): lambda seconds: sleep(seconds) if self.task is None else self.pause(seconds),
            (secrets, "token_bytes"): drawn,
        }
        with ExitStack() as stack:
            for (module, name), change in changes.items():
                stack.enter_context(mock.patch.object(module, name, change))
            yield
