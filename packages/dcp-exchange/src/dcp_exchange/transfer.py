"""`Transfer`: one rank's part in an exchange: it reads pieces, passes them on, and takes pieces that others read.

A piece lies in a slot of the reading rank's arena, from where the other ranks of the host copy it; of another host, one
rank gets it into its own arena. A slot is reused after all users have finished. So bytes in flight never exceed the
arenas, and no rank waits for another's order of reading.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from dcp_exchange.arena import Arena, Window
from dcp_exchange.errors import ExchangeError, ExchangeInterruptedError
from dcp_exchange.piece_queue import PieceQueue, PieceReader
from dcp_exchange.topology import Plan, Roles
from dcp_io import CheckpointReplacedError
from dcp_io.reading.delivery import Delivery
from dcp_ranks import NOT_NOW, Stream, StreamError, Streams
from dcp_ranks.streams.reception import NotNow

_POLL_SECONDS = 1.0

# What is to be done, and the host on which its piece was read.
_Task = tuple[Callable[[], None], int]


class Transfer:
    """One rank's part in an exchange; a `dcp_ranks.StreamHandler`; its threads do the slow work.

    The owner of the arena closes it after `close`. `timeout_seconds` is the longest time without messages.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        delivery: Delivery,
        reader: PieceReader,
        queue: PieceQueue,
        streams: Streams,
        threads: int,
        arena: Arena,
        timeout_seconds: float,
    ) -> None:
        pieces = plan.assignment
        self._rank = rank
        self._roles = Roles(plan, rank)
        self._names = [pieces.names[number] for number in pieces.objects.tolist()]
        self._starts: list[int] = pieces.starts.tolist()
        self._sizes: list[int] = (pieces.stops - pieces.starts).tolist()
        self._classes, self._owners = pieces.classes.tolist(), pieces.owners.tolist()
        self._delivery, self._reader, self._queue, self._arena = delivery, reader, queue, arena
        self._timeout_seconds = timeout_seconds
        self._streams = streams.made
        self._dispatcher = streams.dispatch(self)
        self._windows: dict[int, Window] = {}
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # Of the same lock, so that what a worker has to do does not wake the thread in `wait`, too.
        self._over = threading.Condition(lock)
        self._tasks: deque[_Task] = deque()
        self._refused: list[Stream] = []
        self._arriving: dict[int, int] = {}
        self._error: BaseException | None = None
        self.origin = self._roles.host
        """Number of the host that read the piece of this rank's error."""
        self._closing = self._has_read_all = False
        self._awaited = {number for number, of_class in enumerate(self._classes) if self._roles.wants(of_class)}
        self._last_news = time.monotonic()
        self.bytes_received = 0
        self._reads = ConcurrencyLimit(threads)
        # One more than read at once: others wait for what lies in this rank's slots, and in theirs, to be taken.
        self._threads = [
            threading.Thread(target=self._work, name="dcp-exchange", daemon=True) for _ in range(threads + 1)
        ]
        self._senders = {host: Sender(self._streams[peer], self.fail) for host, peer in self._roles.distant.items()}

    def start(self) -> None:
        """Pass this rank's arena to the neighbours, and start the threads."""
        greeting = encode(Message(Kind.ARENA, self._arena.slot_bytes))
        for neighbour in self._roles.neighbours:
            self._streams[neighbour].send(greeting, descriptor=self._arena.descriptor)
        self._dispatcher.start()
        for thread in (*self._threads, *self._senders.values()):
            thread.start()

    def wait(self) -> None:
        """Wait until this rank has all its bytes and no rank needs the pieces that it read.

        The threads pass on other pieces until `close`. An error of this rank is raised.

        Raises:
            ExchangeInterruptedError: Another rank failed.
            ExchangeError: Other ranks sent nothing before the timeout.
        """
        with self._changed:
            self._last_news = time.monotonic()
            while self._error is None and not self._is_finished():
                left = self._last_news + self._timeout_seconds - time.monotonic()
                if left <= 0:
                    self._fail(self._silence())
                self._over.wait(max(0.0, min(left, _POLL_SECONDS)))
            if self._error is not None:
                raise self._error

    def fail(self, error: BaseException) -> None:
        """End the exchange on all ranks; the first error counts."""
        with self._changed:
            self._fail(error)

    def close(self) -> None:
        """End the threads; later calls do nothing."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._tasks.clear()
            self._wake_all()
        for sender in self._senders.values():
            sender.end(abort=self._error is not None)
        for thread in (*self._threads, *self._senders.values()):
            if thread.ident is not None:
                thread.join()
        try:
            self._dispatcher.close()
        except Exception:
            if self._error is None:  # otherwise `wait` has raised
                raise
        for received in (self._tasks, self._arriving, self._refused):  # since the threads ended
            received.clear()
        self._windows.clear()
        self._reader.close()
        # Both lead back to this transfer, and would keep the memory of pieces until a garbage collection.
        self._senders.clear()
        self._error = None

    def on_message(
        self, stream: Stream, data: bytes, payload_bytes: int, descriptor: int | None
    ) -> memoryview | NotNow | None:
        """Handle a message of another rank."""
        with self._changed:
            self._last_news = time.monotonic()
            try:
                message = decode(data)
                if message.kind is Kind.PIECE:
                    return self._find_room(stream, message, payload_bytes)
                self._handle(stream, message, descriptor)
            except Exception as error:  # noqa: BLE001 - `wait` raises it
                self._fail(error)
        return None

    def on_payload(self, stream: Stream, data: bytes, buffer: memoryview) -> None:
        """Handle a piece from another host."""
        message = decode(data)
        with self._changed:
            self._last_news = time.monotonic()
            self._add(partial(self._take_arrived, self._arriving.pop(stream.rank), message, buffer), message.origin)

    def on_goodbye(self, stream: Stream) -> None:
        """Do nothing: all ranks have finished."""

    def on_lost(self, stream: Stream, reason: str) -> None:
        """End the exchange: pieces from this rank no longer arrive."""
        with self._changed:
            if not self._closing:
                # Of this rank itself if its dispatcher has ended.
                self._fail(self._dispatcher.error or StreamError(stream.rank, stream.address, reason))

    def _handle(self, stream: Stream, message: Message, descriptor: int | None) -> None:
        if message.kind is Kind.ARENA and descriptor is not None:
            self._windows[stream.rank] = Window(descriptor, message.piece)
        elif message.kind is Kind.READY:
            self._add(partial(self._take_ready, stream, message), message.origin)
        elif message.kind is Kind.DONE:
            self._release(message.slot)
        elif message.kind is Kind.STOP:
            self._fail(ExchangeInterruptedError(message.text, replaced=message.checked))

    def _find_room(self, stream: Stream, message: Message, payload_bytes: int) -> memoryview | NotNow:
        if payload_bytes != self._sizes[message.piece]:
            raise ValueError(f"rank {stream.rank} sent {payload_bytes} bytes for piece {message.piece}")
        purpose = 1 + self._roles.lane(stream.rank)
        if not self._arena.has_free(purpose):
            self._refused.append(stream)
            return NOT_NOW
        slot = self._arriving[stream.rank] = self._arena.take(purpose)
        return self._arena.view(slot, payload_bytes)

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            run, origin = task
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                traceback.clear_frames(error.__traceback__)  # whoever keeps the error keeps no memory of pieces
                with self._changed:
                    if self._error is None:
                        self.origin = origin
                    self._fail(error)

    def _next_task(self) -> _Task | None:
        """Wait for a task; None at the end. Taking comes before reading, so that slots become free."""
        with self._changed:
            while not self._closing and self._error is None:
                if self._tasks:
                    task = self._tasks.popleft()
                    self._note_progress()
                    return task
                if not self._has_read_all and self._reads.allows_another and self._arena.has_free():
                    self._reads.begin()
                    return partial(self._read, self._arena.take()), self._roles.host
                self._changed.wait()
        return None

    def _read(self, slot: int) -> None:
        piece = self._queue.next()
        if piece is None:
            with self._changed:
                self._has_read_all = True
                self._release(slot)
            return
        view = self._arena.view(slot, self._sizes[piece])
        begun = time.monotonic()
        self._reader.read(self._names[piece], self._starts[piece], view)
        with self._changed:
            self._reads.end(time.monotonic() - begun)
            self._changed.notify(2)  # another read takes its place, and one more may begin
        self._pass_on(piece, slot, view, self._roles.host)

    def _take_arrived(self, slot: int, message: Message, view: memoryview) -> None:
        self._count_received(message.piece)
        self._pass_on(message.piece, slot, view, message.origin)

    def _pass_on(self, piece: int, slot: int, view: memoryview, origin: int) -> None:
        of_class = self._classes[piece]
        wants = self._roles.wants(of_class)
        checked = wants and self._delivery.check(self._names[piece], self._starts[piece], view)
        users, onward = self._roles.users(of_class, origin), self._roles.onward(of_class, origin)
        with self._changed:
            self._arena.share(slot, len(users) + len(onward))
        ready = encode(Message(Kind.READY, piece, slot, origin, checked))
        for user in users:
            self._streams[user].post(ready)
        done = partial(self._release, slot)
        for host in onward:
            self._senders[host].send(encode(Message(Kind.PIECE, piece, 0, origin)), view, done)
        if wants:
            self._take(piece, view, checked=checked)
        done()

    def _take_ready(self, stream: Stream, message: Message) -> None:
        piece = message.piece
        of_class = self._classes[piece]
        view = self._windows[stream.rank].view(message.slot, self._sizes[piece])
        onward = self._roles.onward(of_class, message.origin)
        answer = encode(Message(Kind.DONE, slot=message.slot))
        done = _last_of(1 + len(onward), lambda: stream.post(answer))
        for host in onward:
            self._senders[host].send(encode(Message(Kind.PIECE, piece, 0, message.origin)), view, done)
        if self._roles.wants(of_class):
            self._count_received(piece)  # before the piece is taken, as `wait` may end with it
            self._take(piece, view, checked=message.checked)
        done()

    def _take(self, piece: int, view: memoryview, *, checked: bool) -> None:
        self._delivery.take(self._names[piece], self._starts[piece], view, checked=checked)
        with self._changed:
            self._awaited.discard(piece)
            self._note_progress()

    def _count_received(self, piece: int) -> None:
        if self._roles.wants(self._classes[piece]):
            with self._changed:
                self.bytes_received += self._sizes[piece]

    def _add(self, task: Callable[[], None], origin: int) -> None:
        self._tasks.append((task, origin))
        self._changed.notify()

    def _release(self, slot: int) -> None:
        with self._changed:
            if self._arena.release(slot):
                refused, self._refused = self._refused, []
                for stream in refused:  # those for which there is still no room are refused again
                    self._dispatcher.resume(stream)
                self._changed.notify()
                self._note_progress()

    def _is_finished(self) -> bool:
        return self._has_read_all and not (self._awaited or self._tasks or self._arena.taken)

    def _note_progress(self) -> None:
        if self._is_finished():
            self._over.notify_all()

    def _wake_all(self) -> None:
        self._changed.notify_all()
        self._over.notify_all()

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        if isinstance(error, StreamError):
            lost = f"rank {self._rank} has lost the connection to rank {error.rank}: {error.reason}"
            error = ExchangeInterruptedError(lost)
        self._error = error
        stop_others(self._streams, error)
        self._wake_all()

    def _silence(self) -> ExchangeError:
        owners = sorted({self._owners[piece] for piece in self._awaited})
        names = ", ".join(map(str, owners[:8])) + (", …" if len(owners) > 8 else "")
        return ExchangeError(
            f"nothing has come from other ranks for {self._timeout_seconds:g} s; pieces that rank {names} had to read "
            f"are missing ({len(self._awaited)}): a rank is stopped, or its storage hangs"
        )


def stop_others(streams: Mapping[int, Stream], error: BaseException) -> None:
    """End the exchange on the ranks connected to this one; they end it on all."""
    replaced = isinstance(error, CheckpointReplacedError) or getattr(error, "replaced", False)
    text = str(error) if isinstance(error, ExchangeInterruptedError) else f"{type(error).__name__}: {error}"
    notice = encode(Message(Kind.STOP, checked=replaced, text=text[:1000]))
    for stream in streams.values():
        with contextlib.suppress(StreamError):  # it learns of it from others, or is gone
            stream.post(notice)


def _last_of(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """Return a thread-safe function that calls `action` at the last of `count` calls."""
    lock = threading.Lock()
    left = [count]

    def one() -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            action()

    return one


# No other rank takes over a read that has begun, so each should be short.
_SHORT_SECONDS, _LONG_SECONDS = 0.5, 1.0


class ConcurrencyLimit:
    """Number of concurrent reads, at most `most`: one more after a short read, one less after a long read.

    Not thread-safe: callers hold a lock.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._limit = 1
        self._begun = 0

    @property
    def allows_another(self) -> bool:
        """Whether another read may begin now."""
        return self._begun < self._limit

    def begin(self) -> None:
        """Count a read that begins."""
        self._begun += 1

    def end(self, seconds: float) -> None:
        """Count a read that ended."""
        self._begun -= 1
        if seconds < _SHORT_SECONDS:
            self._limit = min(self._most, self._limit + 1)
        elif seconds > _LONG_SECONDS:
            self._limit = max(1, self._limit - 1)


_FORM = struct.Struct("<BQII?")


class Kind(enum.IntEnum):
    """Kind of a message."""

    ARENA = 0
    """The sender's arena, with its descriptor; `piece` is the size of its slots in bytes."""
    READY = 1
    """A piece lies in a slot of the sender's arena."""
    DONE = 2
    """The sender has taken its part from a slot of the receiver's arena."""
    PIECE = 3
    """The bytes of a piece follow as a payload."""
    STOP = 4
    """The exchange has failed on some rank; its text follows. `checked`: the checkpoint was replaced."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; the meaning of a field depends on the kind.

    Attributes:
        origin: Number of the host that read the piece.
        checked: Whether the piece was checked on its way to this host.
    """

    kind: Kind
    piece: int = 0
    slot: int = 0
    origin: int = 0
    checked: bool = False
    text: str = ""


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    head = _FORM.pack(message.kind, message.piece, message.slot, message.origin, message.checked)
    return head + message.text.encode("utf-8", "replace")


def decode(data: bytes) -> Message:
    """Return the message in `data`; raise ValueError if it is invalid."""
    try:
        kind, piece, slot, origin, checked = _FORM.unpack_from(data)
        return Message(Kind(kind), piece, slot, origin, checked, data[_FORM.size :].decode())
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{data[:32]!r} is no message of an exchange") from error


class Sender(threading.Thread):
    """Thread that sends pieces over one stream, in order. `on_error` gets the error that ends it."""

    def __init__(self, stream: Stream, on_error: Callable[[Exception], None]) -> None:
        super().__init__(name=f"dcp-exchange-to-{stream.rank}", daemon=True)
        self._stream = stream
        self._on_error = on_error
        self._queue: queue.SimpleQueue[tuple[bytes, memoryview, Callable[[], None]] | None] = queue.SimpleQueue()
        self._ended = False

    def send(self, message: bytes, payload: memoryview, done: Callable[[], None]) -> None:
        """Send a message and its payload later; `done` is called when the payload is no longer needed."""
        self._queue.put((message, payload, done))

    def end(self, *, abort: bool) -> None:
        """End the thread after the current piece, or with `abort` immediately."""
        self._ended = True
        if abort:
            self._stream.lose("the exchange has failed")
        self._queue.put(None)

    def run(self) -> None:
        """Send until `end`."""
        while (task := self._queue.get()) is not None and not self._ended:
            message, payload, done = task
            try:
                self._stream.send(message, [payload])
                done()
            except Exception as error:  # noqa: BLE001 - `on_error` reports it
                self._on_error(error)
                return
