"""Streams and events of the pretend device, and when their work runs.

Work is queued, and runs in the thread that waits for it: as late as a device could run it, and in no order but that
which streams and events require. A schedule lets some run earlier, at random. A missing wait shows as a wrong value.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["NAME", "Event", "Hold", "Machine", "Schedule", "Stream", "machine"]

NAME = "pretend"


class Work:
    """A function in a stream's queue, after what it waits for."""

    def __init__(self, stream: Stream | None, function: Callable[[], object] | None, waits: Work | None = None) -> None:
        self.stream, self.function, self.waits = stream, function, waits
        self.done = False


class Hold(Work):
    """Something that the device does until `release`."""

    def __init__(self) -> None:
        super().__init__(None, None)

    def release(self) -> None:
        """Let the device go on."""
        with machine.changed:
            self.done = True
            machine.changed.notify_all()


@dataclass
class Schedule:
    """How much of the queued work runs before anything waits for it: none, or each piece with a chance."""

    chance: float = 0.0
    seed: int = 0
    reuse: bool = True
    """Whether freed memory is overwritten as soon as its stream allows, as by the next tensor there.

    Off for FSDP2: it frees memory that it still uses, which is safe on a real device because no other tensor is
    allocated on its streams.
    """
    random: random.Random = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)


class _Local(threading.local):
    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class Machine:
    """Devices with their queues; one in each process."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.changed = threading.Condition(threading.RLock())
        self.streams: dict[tuple[int, int], Stream] = {}
        self.contexts: set[int] = set()
        """Devices on which the process has a context: each takes hundreds of megabytes on a real one."""
        self.schedule = Schedule()
        self.pageable_copies = 0
        """Copies that were to be asynchronous and were not, since the host memory is not pinned."""
        self.violations: list[str] = []
        """What a real device would do undefined things after."""
        self.made = 0
        self.before_launch: Callable[[], object] = lambda: None
        self.local = _Local()

    def launch(
        self, stream: Stream, function: Callable[[], object] | None, waits: Work | None = None, *, early: bool = True
    ) -> Work:
        """Queue a function."""
        self.before_launch()
        work = Work(stream, function, waits)
        with self.changed:
            self.contexts.add(stream.device_index)
            stream.queue.append(work)
        if early:
            self._run_some()
        return work

    def complete(self, work: Work) -> None:
        """Run what is queued before `work`, and `work`; nothing else."""
        while not work.done:
            self._advance(work)

    def pending(self) -> int:
        """Return how many pieces of work are queued."""
        with self.changed:
            return sum(len(stream.queue) for stream in self.streams.values())

    def finish(self, device: int | None = None) -> None:
        """Run everything that is queued."""
        for stream in [*self.streams.values()]:
            if device is None or stream.device_index == device:
                stream.synchronize()

    def _advance(self, work: Work) -> None:
        with self.changed:
            while True:
                if work.done:
                    return
                stream = work.stream
                if stream is None or stream.running:
                    self.changed.wait(1.0)
                    return
                head = stream.queue[0]
                if head.waits is None or head.waits.done:
                    break
                work = head.waits
            stream.running = True
        self._run(stream, head)

    def _run(self, stream: Stream, head: Work) -> None:
        try:
            if head.function is not None:
                with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                    head.function()
        finally:
            with self.changed:
                stream.queue.popleft()
                stream.running, head.done = False, True
                self.changed.notify_all()

    def _run_some(self) -> None:
        while self.schedule.random.random() < self.schedule.chance:
            with self.changed:
                ready = [stream for stream in self.streams.values() if stream.is_ready()]
                if not ready:
                    return
                stream = self.schedule.random.choice(ready)
                stream.running = True
            self._run(stream, stream.queue[0])

    def current_stream(self, device: int) -> Stream:
        """Return this thread's stream on a device."""
        return self.local.streams.get(device) or self.stream(device, 0)

    def stream(self, device: int, number: int) -> Stream:
        """Return a stream by its number; 0 is the default stream."""
        found = self.streams.get((device, number))
        return found if found is not None else Stream.numbered(device, number)

    def index(self, device: Any) -> int:
        """Return the number of a device that is named in any of torch's ways; None is the current one."""
        if isinstance(device, int):
            return device
        number = None if device is None else torch.device(device).index
        return self.local.device if number is None else number

    @contextmanager
    def scheduled(self, schedule: Schedule) -> Iterator[None]:
        """Run work by another schedule."""
        before, self.schedule = self.schedule, schedule
        try:
            yield
        finally:
            self.schedule = before


machine = Machine()


class Stream(torch.Stream):
    """A stream of the pretend device, with the methods of a CUDA stream."""

    queue: deque[Work]
    running: bool

    def __new__(cls, device: Any = None, priority: int = 0, **_: Any) -> Stream:
        index = machine.index(device)
        with machine.changed:
            machine.made += 1
            number = 1 + machine.made % _POOL
            return machine.streams.get((index, number)) or cls.numbered(index, number)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def numbered(cls, device: int, number: int) -> Stream:
        """Make a stream."""
        if not 0 <= device < machine.devices:
            raise RuntimeError(f"{NAME} has {machine.devices} devices, not one of the number {device}")
        made = super().__new__(cls, stream_id=number, device_index=device, device_type=_DEVICE_TYPE)
        made.queue, made.running = deque(), False
        machine.streams[device, number] = made
        return made

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait for what was recorded."""
        if event.work is not None and not event.work.done:
            machine.launch(self, None, event.work)

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream wait for the other stream's."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Any = None) -> Any:
        """Record an event, or a new one, and return it."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for all work."""
        with machine.changed:
            last = self.queue[-1] if self.queue else None
        if last is not None:
            machine.complete(last)

    def is_ready(self) -> bool:
        """Return whether work can run."""
        if self.running or not self.queue:
            return False
        waits = self.queue[0].waits
        return waits is None or waits.done

    def query(self) -> bool:
        """Return whether all work is done."""
        return not self.queue


class Event:
    """An event of the pretend device, with the methods of a CUDA event."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        del enable_timing
        self.work: Work | None = None

    def record(self, stream: Any = None) -> None:
        """Record the work that a stream has now."""
        self.work = machine.launch(stream or machine.current_stream(machine.local.device), None)

    def wait(self, stream: Any = None) -> None:
        """Let later work of a stream wait."""
        (stream or machine.current_stream(machine.local.device)).wait_event(self)

    def synchronize(self) -> None:
        """Wait for what was recorded."""
        if self.work is not None:
            machine.complete(self.work)

    def query(self) -> bool:
        """Return whether what was recorded is done."""
        return self.work is None or self.work.done


_POOL = 32  # a new stream may be an old one, as with CUDA
_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
