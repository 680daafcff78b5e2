"""`Transfer`: one rank's part in an exchange: reads its pieces, passes them on, and takes those that others have read.

A piece lies in a slot of the arena of the rank that has read it. The other ranks of the host copy from there straight
into their destinations; the rank that keeps the connection to another host sends it from there, and the rank at the
other end puts it into a slot of its own arena. Whoever has finished with a slot says so, and the slot is used again. So
what is under way never exceeds the arenas, and no rank waits for the order in which another one reads.

Not in this module: who reads what (`assignment`), the phases around (`together`).
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial

from dcp_exchange.arena import Arena, Window
from dcp_exchange.concurrency_limit import ConcurrencyLimit
from dcp_exchange.errors import ExchangeInterruptedError, ExchangeTimeoutError
from dcp_exchange.messages import Kind, Message, decode, encode
from dcp_exchange.piece_queue import PieceQueue
from dcp_exchange.piece_reader import PieceReader
from dcp_exchange.roles import Plan, Roles
from dcp_exchange.sender import Sender
from dcp_io import CheckpointReplacedError, Delivery
from dcp_ranks import NOT_NOW, NotNow, Stream, StreamError, Streams

__all__ = ["Transfer"]

_LOOK_SECONDS = 1.0

# What is to be done, and the host on which its piece was read.
_Task = tuple[Callable[[], None], int]


class Transfer:
    """One rank's part in an exchange. Handler of a dispatcher of streams; threads of its own do what takes time.

    Args:
        plan: The plan, the same on all ranks.
        rank: This rank.
        delivery: This rank's demands; it expects the shared bytes alone.
        reader: Reader of pieces from storage.
        queue: The pieces to read.
        streams: Connections to the ranks that `Roles` names.
        threads: The most pieces to read at once.
        arena: This rank's arena, which `close` closes.
        timeout_seconds: Time without any news from other ranks after which this rank gives up.
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
        """Number of the host that has read the piece with which this rank's error has to do."""
        self._closing = self._has_read_all = False
        self._awaited = {number for number, of_class in enumerate(self._classes) if self._roles.wants(of_class)}
        self._last_news = time.monotonic()
        self.bytes_received = 0
        """Number of bytes of pieces that other ranks have read for this rank."""
        self._reads = ConcurrencyLimit(threads)
        # One more than read at once: others wait for what lies in this rank's slots, and in theirs, to be taken.
        self._threads = [
            threading.Thread(target=self._work, name="dcp-exchange", daemon=True) for _ in range(threads + 1)
        ]
        self._senders = {
            host: Sender(self._streams[peer], self._fail_to_send) for host, peer in self._roles.distant.items()
        }

    def start(self) -> None:
        """Pass this rank's arena to the neighbours, and start the threads.

        Raises:
            StreamError: A neighbour is lost.
        """
        greeting = encode(Message(Kind.ARENA, self._arena.slot_bytes))
        for neighbour in self._roles.neighbours:
            self._streams[neighbour].send(greeting, descriptor=self._arena.descriptor)
        self._dispatcher.start()
        for thread in (*self._threads, *self._senders.values()):
            thread.start()

    def wait(self) -> None:
        """Wait until this rank has all of its bytes and has read its pieces, and nobody needs these any more.

        The threads go on passing on what others read, until `close`.

        Raises:
            ExchangeInterruptedError: Another rank has failed.
            ExchangeTimeoutError: Other ranks have sent nothing for the timeout.
            BaseException: An error of this rank.
        """
        with self._changed:
            self._last_news = time.monotonic()
            while self._error is None and not self._is_finished():
                left = self._last_news + self._timeout_seconds - time.monotonic()
                if left <= 0:
                    self._fail(self._silence())
                self._over.wait(max(0.0, min(left, _LOOK_SECONDS)))
            if self._error is not None:
                raise self._error

    def fail(self, error: BaseException) -> None:
        """End the exchange on all ranks because of an error on this one; the first error counts."""
        with self._changed:
            self._fail(error)

    def close(self) -> None:
        """End the threads, and free the arena; later calls do nothing."""
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
        self._dispatcher.close()
        for received in (self._tasks, self._arriving, self._refused):  # since the threads ended
            received.clear()
        self._windows.clear()
        self._arena.close()
        self._reader.close()
        # Both lead back to this transfer, and would keep the memory of pieces until a garbage collection.
        self._senders.clear()
        self._error = None

    def on_message(
        self, stream: Stream, data: bytes, payload_bytes: int, descriptor: int | None
    ) -> memoryview | NotNow | None:
        """Handle a message of another rank; see `dcp_ranks.StreamHandler`."""
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
        """Handle a piece that has arrived from another host."""
        message = decode(data)
        with self._changed:
            self._last_news = time.monotonic()
            self._add(partial(self._take_arrived, self._arriving.pop(stream.rank), message, buffer), message.origin)

    def on_goodbye(self, stream: Stream) -> None:
        """Do nothing: a rank says goodbye when all ranks have finished."""

    def on_lost(self, stream: Stream, reason: str) -> None:
        """End the exchange: a rank on which others depend is gone."""
        with self._changed:
            if not self._closing:
                self._fail(ExchangeInterruptedError(f"the connection to rank {stream.rank} is lost: {reason}"))

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
        """Return a slot for a piece from another host."""
        if payload_bytes != self._size(message.piece):
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
            except StreamError as error:
                self._fail_to_send(error)
            except BaseException as error:  # noqa: BLE001 - `wait` raises it
                traceback.clear_frames(error.__traceback__)  # whoever keeps the error keeps no memory of pieces
                with self._changed:
                    if self._error is None:
                        self.origin = origin
                    self._fail(error)

    def _next_task(self) -> _Task | None:
        """Wait for something to do, and return it; None if all is over. To take comes before to read.

        Nobody may wait for a slot while others wait for what lies in theirs to be taken.
        """
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
        """Read the next piece from storage into a slot, and pass it on."""
        piece = self._queue.next()
        if piece is None:
            with self._changed:
                self._has_read_all = True
                self._release(slot)
            return
        view = self._arena.view(slot, self._size(piece))
        begun = time.monotonic()
        self._reader.read(self._names[piece], self._starts[piece], view)
        with self._changed:
            self._reads.end(time.monotonic() - begun)
            self._changed.notify(2)  # another read takes its place, and one more may begin
        self._pass_on(piece, slot, view, self._roles.host)

    def _take_arrived(self, slot: int, message: Message, view: memoryview) -> None:
        """Pass on a piece that has come from another host, where a network may have changed it."""
        self._count_received(message.piece)
        self._pass_on(message.piece, slot, view, message.origin)

    def _pass_on(self, piece: int, slot: int, view: memoryview, origin: int) -> None:
        """Check a piece in a slot of this rank, tell everybody who needs it, and take it."""
        of_class = self._classes[piece]
        wants = self._roles.wants(of_class)
        checked = wants and self._delivery.check(self._names[piece], self._starts[piece], view)
        users, onward = self._roles.users(of_class, origin), self._roles.onward(of_class, origin)
        with self._changed:
            self._arena.share(slot, len(users) + len(onward))
        ready = encode(Message(Kind.READY, piece, slot, origin, checked))
        for user in users:
            self._streams[user].post(ready)
        done = partial(self._release_later, slot)
        for host in onward:
            self._senders[host].send(encode(Message(Kind.PIECE, piece, 0, origin)), view, done)
        if wants:
            self._take(piece, view, checked=checked)
        done()

    def _take_ready(self, stream: Stream, message: Message) -> None:
        """Take a piece from a slot of a neighbour, and send it on to other hosts."""
        piece = message.piece
        of_class = self._classes[piece]
        view = self._windows[stream.rank].view(message.slot, self._size(piece))
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
                self.bytes_received += self._size(piece)

    def _add(self, task: Callable[[], None], origin: int) -> None:
        self._tasks.append((task, origin))
        self._changed.notify()

    def _release_later(self, slot: int) -> None:
        with self._changed:
            self._release(slot)

    def _release(self, slot: int) -> None:
        """Remove one user of a slot of this rank's arena."""
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

    def _size(self, piece: int) -> int:
        return self._sizes[piece]

    def _fail_to_send(self, error: Exception) -> None:
        self.fail(ExchangeInterruptedError(str(error)) if isinstance(error, StreamError) else error)

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        replaced = isinstance(error, CheckpointReplacedError) or getattr(error, "replaced", False)
        notice = encode(Message(Kind.STOP, checked=replaced, text=f"{type(error).__name__}: {error}"[:1000]))
        for stream in self._streams.values():
            try:
                stream.post(notice)
            except StreamError:  # it learns of it from others, or is gone
                continue
        self._wake_all()

    def _silence(self) -> ExchangeTimeoutError:
        owners = sorted({self._owners[piece] for piece in self._awaited})
        names = ", ".join(map(str, owners[:8])) + (", …" if len(owners) > 8 else "")
        return ExchangeTimeoutError(
            f"nothing has come from other ranks for {self._timeout_seconds:g} s; {len(self._awaited)} pieces are "
            f"missing, which rank {names} had to read: a rank is stopped, or its storage hangs"
        )


def _last_of(count: int, action: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `action` when it is called for the last of `count` times; thread-safe."""
    lock = threading.Lock()
    left = [count]

    def one() -> None:
        with lock:
            left[0] -= 1
            is_last = left[0] == 0
        if is_last:
            action()

    return one
