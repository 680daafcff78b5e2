"""TCP connections that exchange frames, and mail: frames that wait for their phase, or until they can be sent.

The kernel answers keepalive probes for a busy process, so no thread sends heartbeats. The process group and each
asynchronous saver number their operations separately, as one series each.

Source: Linux `tcp(7)`: TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_USER_TIMEOUT.
"""

from __future__ import annotations

import socket
import struct
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dcp_ranks.transport.store_wire import keep_lease

Key = tuple[int, int]
"""Numbers of an operation and of its phase."""

_HEAD = struct.Struct("<BQIIQ")
_MAX_BODY_BYTES = 1 << 40
_MAX_STRANGE_BYTES = 256
_READ_BYTES = 8 << 20  # per turn of one link, so that other links do not wait
_VIEWS_AT_ONCE = 64
_SERIES_BITS = 32

# This size fits into a connection's buffers. Larger frames are sent only to a rank that is reading, because the kernel
# closes a connection that takes no bytes for the peer timeout.
_UNASKED_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Frame:
    """One message between ranks; `rank` is the rank that it is about, not always the sender."""

    kind: int
    sequence: int
    step: int
    rank: int
    body: bytes | bytearray


class Link:
    """TCP connection to another rank, perhaps not yet established; owns the socket. Not thread-safe; never blocks."""

    def __init__(self, connection: socket.socket, peer_timeout_seconds: float) -> None:
        self._socket = connection
        self._out: deque[memoryview] = deque()
        self._head = bytearray()
        self._body: bytearray | None = None
        self._filled = 0
        self.waits_to_send = False
        self.reached = False
        self.silent = False  # broken because the other host did not answer
        self.broken: str | None = None
        """Why the connection cannot be used any more, or None."""
        self.rank: int | None = None
        """Rank at the other end; None before authentication, when only small messages are accepted."""
        connection.setblocking(False)
        keep_lease(connection, peer_timeout_seconds)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """Whether frames are still being sent."""
        return bool(self._out)

    def send(self, *frames: Frame) -> None:
        """Send what the connection takes; queue the rest for `flush`."""
        for frame in frames:
            head = _HEAD.pack(frame.kind, frame.sequence, frame.step, frame.rank, len(frame.body))
            self._out += [memoryview(head), memoryview(frame.body)]
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes of the queue."""
        while self._out and self.broken is None:
            try:
                sent = self._socket.sendmsg([*islice(self._out, _VIEWS_AT_ONCE)])
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            self.reached = True
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]

    def receive(self) -> Iterator[Frame]:
        """Yield complete frames; set `broken` if the other rank has closed the connection."""
        taken = 0
        while taken < _READ_BYTES and self.broken is None:
            try:
                count = self._read()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._break(error)
                return
            if not count:
                self.broken = "its connection was closed"
                return
            taken += count
            frame = self._whole()
            if frame is not None:
                yield frame

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self.broken = self.broken or "closed"

    def _read(self) -> int:
        if self._body is not None:
            count = self._socket.recv_into(memoryview(self._body)[self._filled :])
            self._filled += count
            return count
        data = self._socket.recv(_HEAD.size - len(self._head))
        self._head += data
        return len(data)

    def _whole(self) -> Frame | None:
        if len(self._head) < _HEAD.size:
            return None
        kind, sequence, step, rank, length = _HEAD.unpack(self._head)
        if self._body is None:
            if length > (_MAX_STRANGE_BYTES if self.rank is None else _MAX_BODY_BYTES):
                self.broken = "it sent an invalid frame"
                return None
            self._body, self._filled = bytearray(length), 0
        if self._filled < length:
            return None
        frame = Frame(kind, sequence, step, rank, self._body)
        self._head, self._body = bytearray(), None
        return frame

    def _break(self, error: OSError) -> None:
        self.broken = f"its connection broke: {error.strerror or error}"
        self.silent = self.reached and not isinstance(error, ConnectionError)
        self._out.clear()


def series_number(series: int, sequence: int) -> int:
    """Return an operation's number, unique over all series; `sequence` is below 2**32."""
    return series << _SERIES_BITS | sequence


class Mail:
    """One rank's frames, by phase. Callers must hold a lock."""

    def __init__(self) -> None:
        self._inbox: defaultdict[Key, list[tuple[int, Frame]]] = defaultdict(list)
        self._outbox: dict[Key, list[Frame]] = {}
        self._unasked_bytes: defaultdict[Key, int] = defaultdict(int)
        self.asked: set[Key] = set()
        """Phases whose large frames the rank above is ready to receive."""
        self._operations: set[int] = set()
        self._newest: defaultdict[int, int] = defaultdict(int)
        """Series → newest operation."""
        self.reading: set[Key] = set()
        """Phases whose large frames this rank is ready to receive."""

    def begin(self, sequence: int) -> None:
        """Keep an operation's frames from now on."""
        self._operations.add(sequence)
        series = sequence >> _SERIES_BITS
        self._newest[series] = max(self._newest[series], sequence)

    def end(self, sequence: int) -> None:
        """Discard an operation's frames, and those of skipped ones."""
        self._operations.discard(sequence)
        for kept in (self._inbox, self._outbox, self._unasked_bytes):
            for key in [key for key in kept if self._is_over(key[0])]:
                kept.pop(key)
        self.asked = {key for key in self.asked if key[0] != sequence}
        self.reading = {key for key in self.reading if key[0] != sequence}

    def put(self, sender: int, frame: Frame) -> None:
        """Keep a received frame, unless its operation has ended."""
        if not self._is_over(frame.sequence):
            self._inbox[frame.sequence, frame.step].append((sender, frame))

    def _is_over(self, sequence: int) -> bool:
        return sequence not in self._operations and sequence <= self._newest[sequence >> _SERIES_BITS]

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """Remove and return a phase's received frames, as (sending rank, frame)."""
        return self._inbox.pop(key, [])

    def keep_for_above(self, frame: Frame) -> None:
        """Queue a frame for the rank above."""
        self._outbox.setdefault((frame.sequence, frame.step), []).append(frame)

    def take_back(self, key: Key) -> list[Frame]:
        """Remove and return a phase's unsent frames."""
        return self._outbox.pop(key, [])

    def ready_for_above(self) -> list[Frame]:
        """Remove and return frames that may be sent now: small ones, and phases that the rank above asked for."""
        ready: list[Frame] = []
        for key, frames in list(self._outbox.items()):
            if key not in self.asked:
                self._unasked_bytes[key] += sum(len(frame.body) for frame in frames)
                if self._unasked_bytes[key] > _UNASKED_BYTES:
                    continue
            ready += self._outbox.pop(key)
        return ready
