"""`Gathering`: one rank's part in passing bytes of tensors to the ranks that write them, in bounded memory.

Every rank goes through its bands in the same order, and an owner accepts parts of its next few bands only. So the
earliest incomplete band always makes progress, whatever the ranks' pace.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dcp_core import SavePlanner, WriteItem
from dcp_core.errors import DcpError
from dcp_format.export.box_writes import cast_pieces, copy_run_bytes
from dcp_format.export.file_map import tensor_data_of
from dcp_format.export.shared_files import Gather
from dcp_manifest.index.runs import Runs
from dcp_ranks import NOT_NOW, Stream, StreamError, Streams
from dcp_ranks.streams.dispatcher import Dispatcher
from dcp_ranks.streams.reception import NotNow

# Number of the tensor, of the band, of the box, and of the first byte among those of the box.
_PART = struct.Struct("<QQQQ")
_DONE = b"done"
_OPEN_BANDS = 4
_KEPT_BYTES = 16 << 20
Write = Callable[[Gather, int, memoryview], None]
Key = tuple[int, int]


@dataclass(slots=True)
class _Band:
    gather: Gather
    begin: int
    stop: int
    data: memoryview | None = None
    filled: int = 0


class Gathering:
    """One rank's part in passing on bytes of tensors; handler of a dispatcher of streams.

    Memory: four bands of 4 MiB, and as much again for what arrives. `gathers` has ascending numbers. After
    `timeout_seconds` without news from other ranks, this rank stops.
    """

    def __init__(self, rank: int, gathers: Sequence[Gather], streams: Streams | None, timeout_seconds: float) -> None:
        self._rank = rank
        self._gathers = gathers
        self._streams = streams
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition(threading.RLock())
        self._refused: list[Stream] = []
        self._error: BaseException | None = None
        self._made: dict[int, Stream] = {} if streams is None else streams.made
        self._finished: set[int] = set()
        self._next = 0
        self._done = False
        self._blocks = _Blocks()
        self._runs: dict[tuple[int, int], Runs] = {}
        self._order: dict[Key, int] = {}
        self._bands: list[_Band] = []
        for gather in gathers:
            for number, (begin, stop) in enumerate(_ranges(gather)):
                if gather.owners[number] == rank:
                    self._order[gather.number, number] = len(self._bands)
                    self._bands.append(_Band(gather, begin, stop))

    def run(self, items: Sequence[WriteItem], planner: SavePlanner, write: Write) -> dict[str, int]:
        """Pass on this rank's boxes, write its bands in order; return FQN → bytes of its boxes after the cast.

        Raises StreamError if another rank failed, DcpError if other ranks sent nothing for the timeout.
        """
        sent: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            dispatcher = None if self._streams is None else stack.enter_context(self._streams.dispatch(self))
            sender = threading.Thread(
                target=self._guarded, args=(lambda: self._send_all(items, planner, sent),), name="dcp-export-send"
            )
            sender.start()
            try:
                for band in self._bands:
                    write(band.gather, band.begin, self._complete(band))
                    self._open_next(band, dispatcher)
                sender.join()
                self._wait_for_all()
            except BaseException as error:
                self._fail(error)
                for stream in self._made.values():
                    stream.lose("this rank has failed")
                raise
            finally:
                sender.join()
            with self._changed:
                self._done = True
                if self._error is not None:
                    raise self._error
        return sent

    def _wait_for_all(self) -> None:
        """Wait until the other ranks have got all of their parts: until then they may not have read what was sent."""
        for stream in self._made.values():
            stream.post(_DONE)
        with self._changed:
            while len(self._finished) < len(self._made):
                self._wait(lambda: len(self._finished))

    def _open_next(self, band: _Band, dispatcher: Dispatcher | None) -> None:
        with self._changed:
            if band.data is not None:
                self._blocks.give_back(band.data)
            band.data = None
            self._next += 1
            resumed, self._refused = self._refused, []
            self._changed.notify_all()
        for stream in resumed:
            if dispatcher is not None:
                dispatcher.resume(stream)

    def on_message(
        self, stream: Stream, message: bytes, payload_bytes: int, descriptor: int | None, /
    ) -> memoryview | NotNow | None:
        """Return memory for a part of a band, or `NOT_NOW` while earlier bands are incomplete."""
        del descriptor
        if message == _DONE:
            with self._changed:
                self._finished.add(stream.rank)
                self._changed.notify_all()
            return None
        tensor, number, _, _ = _PART.unpack(message)
        place = self._order.get((tensor, number), -1)
        with self._changed:
            if place < self._next:
                self._fail(DcpError(f"rank {stream.rank} sent bytes of tensor {tensor} that are not due"))
                return None
            if place >= self._next + _OPEN_BANDS:
                self._refused.append(stream)
                return NOT_NOW
        return self._blocks.take(payload_bytes)

    def on_payload(self, stream: Stream, message: bytes, buffer: memoryview, /) -> None:
        """Copy a part into its band."""
        del stream
        tensor, number, box, position = _PART.unpack(message)
        self._guarded(lambda: self._put(self._bands[self._order[tensor, number]], box, position, buffer))
        self._blocks.give_back(buffer)

    def on_goodbye(self, stream: Stream, /) -> None:
        """Do nothing: the other rank has sent its parts."""

    def on_lost(self, stream: Stream, reason: str, /) -> None:
        """Fail, unless this rank has finished."""
        if not self._done:
            self._fail(StreamError(stream.rank, stream.address, reason))

    def _put(self, band: _Band, box: int, position: int, piece: memoryview) -> None:
        with self._changed:
            if band.data is None:
                band.data = self._blocks.take(band.stop - band.begin)
            data = band.data
        copy_run_bytes(data, band.begin, self._runs_of(band.gather, box), position, piece)
        with self._changed:
            band.filled += len(piece)
            self._changed.notify_all()

    def _complete(self, band: _Band) -> memoryview:
        with self._changed:
            while band.filled < band.stop - band.begin:
                self._wait(lambda: band.filled)
            if band.data is None:
                raise DcpError(f"{band.gather.fqn!r} has a band without bytes")
            return band.data

    def _wait(self, progress: Callable[[], int]) -> None:
        """Wait for a change, under the lock. Raises another thread's error, or DcpError after the timeout."""
        before = progress()
        news = self._changed.wait_for(lambda: self._error is not None or progress() != before, self._timeout_seconds)
        if self._error is not None:
            raise self._error
        if not news:
            raise DcpError(
                f"rank {self._rank} waited {self._timeout_seconds:.0f} s for other ranks' parts of tensors: a rank is "
                "stopped, or slow; raise timeout_seconds if it is only slow"
            )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the other thread raises it
            self._fail(error)

    def _send_all(self, items: Sequence[WriteItem], planner: SavePlanner, sent: dict[str, int]) -> None:
        by_name: dict[str, list[WriteItem]] = defaultdict(list)
        for item in items:
            by_name[item.index.fqn].append(item)
        for gather in self._gathers:
            mine = [_Sending(gather, item, planner, self._rank) for item in by_name[gather.fqn]]
            for number, (_, stop) in enumerate(_ranges(gather)):
                for one in mine:
                    for position, piece in one.until(stop):
                        self._send(gather, number, one.box, position, piece)
                        sent[gather.fqn] = sent.get(gather.fqn, 0) + len(piece)

    def _send(self, gather: Gather, number: int, box: int, position: int, piece: memoryview) -> None:
        if self._error is not None:
            raise self._error
        owner = gather.owners[number]
        if owner != self._rank:
            self._made[owner].send(_PART.pack(gather.number, number, box, position), [piece])
            return
        place = self._order[gather.number, number]
        with self._changed:
            while place >= self._next + _OPEN_BANDS:
                self._wait(lambda: self._next)
        self._put(self._bands[place], box, position, piece)

    def _runs_of(self, gather: Gather, box: int) -> Runs:
        key = gather.number, box
        if key not in self._runs:
            self._runs[key] = gather.runs(gather.boxes[box])
        return self._runs[key]


class _Blocks:
    """Memory that is used again: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = defaultdict(list)
        self._kept_bytes = 0

    def take(self, size: int) -> memoryview:
        with self._lock:
            if self._free[size]:
                self._kept_bytes -= size
                return self._free[size].pop()
        return memoryview(bytearray(size))

    def give_back(self, block: memoryview) -> None:
        """Sizes that are not used any more make room for the block."""
        with self._lock:
            if self._kept_bytes + len(block) > _KEPT_BYTES:
                self._free.clear()
                self._kept_bytes = 0
            self._kept_bytes += len(block)
            self._free[len(block)].append(block)


class _Sending:
    def __init__(self, gather: Gather, item: WriteItem, planner: SavePlanner, rank: int) -> None:
        chunk = tensor_data_of(item).chunk
        wanted = rank, tuple(chunk.offsets), tuple(chunk.sizes)
        found = (at for at, box in enumerate(gather.boxes) if (box.rank, box.offsets, box.sizes) == wanted)
        self.box = next(found)
        self._runs = gather.runs(gather.boxes[self.box])
        self._pieces = cast_pieces(item, planner.resolve_data(item), gather.place.dtype)
        self._piece = memoryview(b"")
        self._position = self._reached = self._end = 0

    def until(self, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the box, bytes) before the byte offset `stop` of the tensor, which ascends."""
        starts, stops = self._runs.within(self._reached, stop)
        self._reached, self._end = stop, self._end + int((stops - starts).sum())
        while self._position < self._end:
            if not self._piece:
                self._piece = next(self._pieces)
            part = self._piece[: self._end - self._position]
            yield self._position, part
            self._position += len(part)
            self._piece = self._piece[len(part) :]


def _ranges(gather: Gather) -> Iterator[tuple[int, int]]:
    begin = 0
    for stop in gather.stops:
        yield begin, stop
        begin = stop
