"""`Courier`: one host's leader in a copy: sends its host's part to its partner, and takes the parts of others.

Not in this module: the choice of partners (`ring`), the phases of a copy (`copying`), storing what arrives (`intake`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from dcp_io import HostStore, crc32
from dcp_manifest import CheckpointIndex, CorruptCheckpointError
from dcp_memory.partners.intake import Intake, is_full
from dcp_memory.partners.messages import Kind, Message, Offer, decode, encode, pack_numbers, unpack_numbers
from dcp_ranks import NOT_NOW, NotNow, OperationError, Stream, StreamError

__all__ = ["PIECE_BYTES", "Courier"]

PIECE_BYTES = 2 << 20
_BUFFERS = 2
_MOST_OFFER_BYTES = 64 << 20
_LOOK_SECONDS = 0.5


class Courier:
    """The leader of one host, which sends and takes at the same time. Handler of a dispatcher of streams.

    Memory: three pieces of 2 MiB beside what the store takes.

    Args:
        store: This host's folder of the checkpoint.
        index: Index of the checkpoint.
        offer: This host's own part.
        pace: Limit of the rate at which this host sends.
        is_cancelled: Function that says whether to give up; called before each piece.
    """

    def __init__(
        self,
        store: HostStore,
        index: CheckpointIndex,
        offer: Offer,
        pace: Callable[[int], object],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._store, self._index, self._offer = store, index, offer
        self._pace, self._is_cancelled = pace, is_cancelled
        self._lock = threading.Lock()
        self._free = [bytearray(PIECE_BYTES) for _ in range(_BUFFERS)]
        self._refused: list[Stream] = []
        self._tasks: queue.SimpleQueue[tuple[Stream, Message, memoryview, bytearray | None] | None] = (
            queue.SimpleQueue()
        )
        self._intakes: dict[int, Intake] = {}
        self._closed_to: set[int] = set()
        """Ranks from which nothing more is taken."""
        self._in_use: dict[int, bytearray] = {}
        self._answers: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._partner: int | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.resume: Callable[[Stream], object] = lambda _: None
        """Function of the dispatcher, which receives again from a stream."""
        self.bytes_sent = 0
        """Number of bytes of files that this host has sent."""
        self.problem: str | None = None
        """Why this host's part is not with its partner, as a clause."""
        self.finished = threading.Event()
        """Set when this host's part is with its partner, or will not be."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._stop.is_set()

    def start(self, partner: Stream | None) -> None:
        """Start to take, and to send to a partner."""
        self._threads.append(threading.Thread(target=self._take_all, name="dcp-partner takes", daemon=True))
        if partner is None:
            self.finished.set()
        else:
            self._partner = partner.rank
            self._threads.append(
                threading.Thread(target=self._send_all, args=(partner,), name="dcp-partner sends", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def close(self, *, succeeded: bool) -> None:
        """End the threads; files that are incomplete are removed. Later calls do nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._answers.put(OperationError("the copy has ended"))
        self._tasks.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if not succeeded:
            for intake in self._intakes.values():
                intake.abort(discard=False)

    # What the dispatcher calls: nothing here waits.

    def on_message(
        self, stream: Stream, data: bytes, payload_bytes: int, descriptor: int | None
    ) -> memoryview | NotNow | None:
        """Handle a message of another leader; see `dcp_ranks.StreamHandler`."""
        del descriptor
        try:
            message = decode(data)
        except ValueError as error:
            self._answers.put(error)
            return None
        if message.kind is Kind.OFFER and payload_bytes <= _MOST_OFFER_BYTES:
            return memoryview(bytearray(payload_bytes))
        if message.kind is Kind.PIECE and 0 < payload_bytes <= PIECE_BYTES:
            return self._find_room(stream, payload_bytes)
        if not payload_bytes and message.kind in (Kind.WANTED, Kind.DONE, Kind.REFUSED):
            self._answers.put(message)
        return None

    def _find_room(self, stream: Stream, payload_bytes: int) -> memoryview | NotNow | None:
        with self._lock:
            if stream.rank in self._closed_to:
                return None
            if not self._free:
                self._refused.append(stream)
                return NOT_NOW
            buffer = self._in_use[stream.rank] = self._free.pop()
        return memoryview(buffer)[:payload_bytes]

    def on_payload(self, stream: Stream, data: bytes, buffer: memoryview) -> None:
        """Handle an offer or a piece that has arrived."""
        message = decode(data)
        room = self._in_use.pop(stream.rank) if message.kind is Kind.PIECE else None
        self._tasks.put((stream, message, buffer, room))

    def on_goodbye(self, stream: Stream) -> None:
        """Do nothing: a rank says goodbye when all ranks have finished."""

    def on_lost(self, stream: Stream, reason: str) -> None:
        """Note the loss of the partner: what this host sends may not arrive."""
        if stream.rank == self._partner:
            self._answers.put(StreamError(stream.rank, stream.address, reason))

    # Taking, in a thread.

    def _take_all(self) -> None:
        while (task := self._tasks.get()) is not None:
            stream, message, view, room = task
            if stream.rank not in self._closed_to and not self._stop.is_set():
                try:
                    self._take(stream, message, view)
                except BaseException as error:  # noqa: BLE001 - the sender learns of it, and with it all ranks
                    self._refuse(stream, error)
            view.release()
            if room is not None:
                self._give_back(room)

    def _take(self, stream: Stream, message: Message, view: memoryview) -> None:
        if message.kind is Kind.OFFER:
            intake = Intake(self._store, self._index, Offer.from_bytes(bytes(view)))
            self._intakes[stream.rank] = intake
            intake.begin()
            count = max(intake.wanted, default=-1) + 1
            stream.post(encode(Message(Kind.WANTED, text=pack_numbers(intake.wanted, count))))
        else:
            intake = self._intakes[stream.rank]
            intake.take(message, view)
        if intake.is_done:
            intake.end()
            stream.post(encode(Message(Kind.DONE)))

    def _refuse(self, stream: Stream, error: BaseException) -> None:
        """Take nothing more from a rank, and say why; a full store is given back its room."""
        with self._lock:
            self._closed_to.add(stream.rank)
        if stream.rank in self._intakes:
            self._intakes[stream.rank].abort(discard=is_full(error))
        with contextlib.suppress(StreamError):
            reason = f"rank {stream.rank}'s partner refused it: {type(error).__name__}: {error}"
            stream.post(encode(Message(Kind.REFUSED, text=reason[:1000])))

    def _give_back(self, room: bytearray) -> None:
        with self._lock:
            self._free.append(room)
            refused, self._refused = self._refused, []
        for stream in refused:
            self.resume(stream)

    # Sending, in a thread.

    def _send_all(self, partner: Stream) -> None:
        try:
            partner.send(encode(Message(Kind.OFFER)), [memoryview(self._offer.to_bytes())])
            wanted = unpack_numbers(self._answer(Kind.WANTED).text)
            names = [*self._offer.sizes]
            for number in wanted:
                self._send_file(partner, number, names[number])
            self._answer(Kind.DONE)
        except BaseException as error:  # noqa: BLE001 - all ranks learn of it in the next phase
            self.problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        finally:
            self.finished.set()

    def _send_file(self, partner: Stream, number: int, name: str) -> None:
        size = self._offer.sizes[name]
        memory = memoryview(bytearray(min(PIECE_BYTES, size)))
        with contextlib.closing(self._store.open_here(name)) as source:
            for offset in range(0, size, PIECE_BYTES):
                self._check()
                count = min(PIECE_BYTES, size - offset)
                if source.brings_memory:
                    piece = source.fetch(offset, count)
                else:
                    piece = memory[:count]
                    source.read_into(offset, [piece])
                partner.send(encode(Message(Kind.PIECE, number, offset, crc32(piece))), [piece])
                self.bytes_sent += count
                self._pace(count)

    def _check(self) -> None:
        """Raise if the copy is to end, or the partner has refused it."""
        if self._stop.is_set() or self._is_cancelled():
            raise OperationError("the copy was given up")
        with contextlib.suppress(queue.Empty):
            self._judge(self._answers.get_nowait(), Kind.DONE)

    def _answer(self, kind: Kind) -> Message:
        """Wait for a message of the partner; its loss, and the end of the copy, end the wait, too."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._judge(self._answers.get(timeout=_LOOK_SECONDS), kind)
            self._check()

    def _judge(self, answer: Message | BaseException, kind: Kind) -> Message:
        if isinstance(answer, BaseException):
            raise answer
        if answer.kind is Kind.REFUSED:
            raise CorruptCheckpointError(answer.text)
        if answer.kind is not kind:
            raise ValueError(f"an answer {answer.kind.name} came instead of {kind.name}")
        return answer
