"""`Courier`: a host's leader in a copy, which sends its part to its partner and takes the parts of others.

The leaders exchange an offer of files, the wanted ones, their pieces, and the end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from dcp_base import DcpError
from dcp_io import HostStore, Sink, SupportsFetch, crc32
from dcp_io.checkpoints.verify_checkpoint import PassingCrcs
from dcp_io.roots.copy_notes import CopyNote
from dcp_manifest import CheckpointIndex, CorruptCheckpointError
from dcp_manifest.index.columns import needed_bytes
from dcp_ranks import NOT_NOW, OperationError, Stream, StreamError
from dcp_ranks.streams.reception import NotNow

MOST_FILES = 1 << 17
"""Limit of an offer, so that the numbers of wanted files fit into a message."""


class Kind(IntEnum):
    """Kind of a message."""

    OFFER = 1
    """The sender's files, as payload."""
    WANTED = 2
    """Numbers of files that the receiver lacks."""
    PIECE = 3
    DONE = 4
    """The receiver has all wanted files."""
    REFUSED = 5
    """The receiver takes no more; the text says why."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message."""

    kind: Kind
    number: int = 0
    offset: int = 0
    crc: int = 0
    text: str = ""
    """Numbers of wanted files, or a reason."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The part of a checkpoint that a host has written."""

    host: str
    save_id: str
    sizes: Mapping[str, int]
    """Data file → size in bytes; files are numbered in this order."""

    def to_bytes(self) -> bytes:
        """Return the payload."""
        return json.dumps([self.host, self.save_id, [*self.sizes.items()]]).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Return a payload's offer; raise ValueError if it is malformed."""
        try:
            host, save_id, sizes = json.loads(data)
            return cls(str(host), str(save_id), {str(name): int(size) for name, size in sizes})
        except TypeError as error:
            raise ValueError(f"an offer is malformed: {error}") from error


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    return json.dumps([message.kind, message.number, message.offset, message.crc, message.text]).encode()


def decode(data: bytes) -> Message:
    """Return a message; raise ValueError if it is malformed."""
    try:
        kind, number, offset, crc, text = json.loads(data)
        return Message(Kind(kind), int(number), int(offset), int(crc), str(text))
    except TypeError as error:
        raise ValueError(f"a message is malformed: {error}") from error


def pack_numbers(numbers: Collection[int], count: int) -> str:
    """Return numbers below `count` as hexadecimal digits of a bit set."""
    bits = bytearray((count + 7) // 8)
    for number in numbers:
        bits[number // 8] |= 1 << number % 8
    return bits.hex()


def unpack_numbers(text: str) -> Sequence[int]:
    """Return `pack_numbers`' numbers, ascending; raise ValueError for malformed text."""
    return [
        8 * place + bit for place, byte in enumerate(bytes.fromhex(text)) if byte for bit in range(8) if byte >> bit & 1
    ]


_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Return whether an error means that a store is full."""
    return isinstance(error, OSError) and error.errno in _FULL


class Intake:
    """Another host's files, which this host's store takes in order. Used by one thread.

    A file has its full size only after its bytes have passed all CRCs.
    """

    def __init__(self, store: HostStore, index: CheckpointIndex, offer: Offer) -> None:
        save_id = None if index.info is None else index.info.save_id
        needed = needed_bytes(index)
        strange = [name for name, size in offer.sizes.items() if size < needed.get(name, size + 1)]
        if offer.save_id != save_id or strange:
            raise CorruptCheckpointError(
                f"host {offer.host} offers {min(strange, default='files')} of save {offer.save_id}, which the index of "
                f"save {save_id} in {store.url} does not name"
            )
        self._store = store
        self._offer = offer
        self._names = [*offer.sizes]
        self._spans: Mapping[str, list[tuple[int, int, int]]] = PassingCrcs.spans_by_file(index)
        self._sink: Sink | None = None
        self._crcs: PassingCrcs | None = None
        self._number = -1
        self._position = 0
        self.wanted: tuple[int, ...] = ()
        """Files that this host lacks; set by `begin`."""
        self._left: list[int] = []
        self._made: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether all wanted files are complete."""
        return not self._left

    def begin(self) -> None:
        """Note the offered files, and determine which are missing."""
        sizes = {entry.name: entry.bytes for entry in self._store.list()}
        self.wanted = tuple(
            number for number, name in enumerate(self._names) if sizes.get(name, -1) < self._offer.sizes[name]
        )
        self._left = [*self.wanted]
        self._note_copies({**self._copies(), self._offer.host: tuple(self._names)})
        for number in [number for number in self.wanted if not self._offer.sizes[self._names[number]]]:
            self._open(number)
            self._complete()

    def take(self, message: Message, piece: memoryview) -> None:
        """Take the next bytes of a file. Raises CorruptCheckpointError for wrong bytes, OSError if the store fails."""
        name = self._names[message.number]
        if crc32(piece) != message.crc:
            raise CorruptCheckpointError("a piece was changed on its way", file=name, offset=message.offset)
        if self._sink is None:
            self._open(message.number)
        sink, crcs = self._sink, self._crcs
        if sink is None or crcs is None or message.number != self._number or message.offset != self._position:
            raise CorruptCheckpointError("a piece is not the next one", file=name, offset=message.offset)
        crcs.take(message.offset, piece)
        sink.write([piece])
        self._position += len(piece)
        if self._position >= self._offer.sizes[name]:
            self._complete()

    def _open(self, number: int) -> None:
        if number not in self._left:
            raise CorruptCheckpointError("a piece of a file came that was not wanted", file=self._names[number])
        name = self._names[number]
        self._store.delete(name)  # what an interrupted copy has left of it
        self._sink, self._crcs = self._store.create(name), PassingCrcs(name, self._spans.get(name, []))
        self._number, self._position = number, 0

    def _complete(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._made.append(self._names[self._number])
            self._left.remove(self._number)
        self._sink = self._crcs = None

    def end(self) -> None:
        """Make the files' names durable, after the last one."""
        self._store.sync_folder()

    def abort(self, *, discard: bool) -> None:
        """Remove the incomplete file; with `discard`, also complete ones. Raises nothing."""
        sink, self._sink = self._sink, None
        with contextlib.suppress(OSError, DcpError):
            if sink is not None:
                sink.abort()
        if discard:
            made, self._made = self._made, []
            with contextlib.suppress(OSError, DcpError):
                for name in made:
                    self._store.delete(name)
                self._note_copies({host: names for host, names in self._copies().items() if host != self._offer.host})

    def _copies(self) -> Mapping[str, tuple[str, ...]]:
        note = CopyNote.read(self._store)
        return note.copies if note.save_id == self._offer.save_id else {}

    def _note_copies(self, copies: Mapping[str, tuple[str, ...]]) -> None:
        CopyNote(self._offer.save_id, copies).write(self._store)


PIECE_BYTES = 2 << 20
_BUFFERS = 2
_MOST_OFFER_BYTES = 64 << 20
_POLL_SECONDS = 0.5


class Courier:
    """The leader of one host, which sends and takes at the same time; a `dcp_ranks.StreamHandler`.

    Memory: three pieces of 2 MiB, in addition to the store's own. `is_cancelled` is called before each piece.
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
        self._in_use: dict[int, bytearray] = {}
        self._answers: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._partner: int | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.resume: Callable[[Stream], object] = lambda _: None
        self.bytes_sent = 0
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
        """End the threads and remove incomplete files. Later calls do nothing."""
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
        """Handle a message of another leader."""
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
        """Handle an offer or a piece."""
        message = decode(data)
        room = self._in_use.pop(stream.rank) if message.kind is Kind.PIECE else None
        self._tasks.put((stream, message, buffer, room))

    def on_goodbye(self, stream: Stream) -> None:
        """Do nothing: all ranks have finished."""

    def on_lost(self, stream: Stream, reason: str) -> None:
        """Note the loss of the partner."""
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
                if isinstance(source, SupportsFetch):
                    piece = source.fetch(offset, count)
                else:
                    piece = memory[:count]
                    source.read_into(offset, [piece])
                partner.send(encode(Message(Kind.PIECE, number, offset, crc32(piece))), [piece])
                self.bytes_sent += count
                self._pace(count)

    def _check(self) -> None:
        if self._stop.is_set() or self._is_cancelled():
            raise OperationError("the copy was given up")
        with contextlib.suppress(queue.Empty):
            self._judge(self._answers.get_nowait(), Kind.DONE)

    def _answer(self, kind: Kind) -> Message:
        """Wait for the partner's message; raise if the partner is lost or the copy ends."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._judge(self._answers.get(timeout=_POLL_SECONDS), kind)
            self._check()

    def _judge(self, answer: Message | BaseException, kind: Kind) -> Message:
        if isinstance(answer, BaseException):
            raise answer
        if answer.kind is Kind.REFUSED:
            raise CorruptCheckpointError(answer.text)
        if answer.kind is not kind:
            raise ValueError(f"an answer {answer.kind.name} came instead of {kind.name}")
        return answer
