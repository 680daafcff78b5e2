"""Mailbox of frames (messages): received frames wait for their phase, and outgoing frames until they can be sent.

Several operations (sequences of phases, such as a save) share the connections between ranks: those of the process
group, and those of each asynchronous saver, which numbers its operations apart. Not in this module: connections.
"""

from __future__ import annotations

from collections import defaultdict

from dcp_ranks.transport.connection import Frame

__all__ = ["Key", "Mail", "series_number"]

Key = tuple[int, int]
"""Key of a phase: sequence number of the operation, and number of the phase within the operation."""

_SERIES_BITS = 32

# Size that fits into the buffers of a connection: larger frames are sent only to a rank that is reading. A busy rank
# takes no bytes, and a kernel gives up on a connection that takes none for the peer timeout.
_UNASKED_BYTES = 16 << 10


def series_number(series: int, sequence: int) -> int:
    """Return the number under which the messages of an operation are sent, unique over all series of operations.

    Args:
        series: Number of the series, within which operations begin in the order of their sequence numbers.
        sequence: Sequence number of the operation within its series, below 2**32.
    """
    return series << _SERIES_BITS | sequence


class Mail:
    """Inbox and outbox of one rank's frames, by phase. Not thread-safe: callers must hold a lock.

    The key of a phase is (sequence number of the operation, number of the phase in the operation). "Above" is the rank
    to which this rank sends its frames on the way to the coordinator.
    """

    def __init__(self) -> None:
        self._inbox: defaultdict[Key, list[tuple[int, Frame]]] = defaultdict(list)
        self._outbox: dict[Key, list[Frame]] = {}
        self._unasked_bytes: defaultdict[Key, int] = defaultdict(int)
        self._asked: set[Key] = set()
        self._operations: set[int] = set()
        self._newest: defaultdict[int, int] = defaultdict(int)
        """Series → newest operation that has begun."""
        self.reading: set[Key] = set()
        """The phases in which this rank is ready to receive large frames."""

    def begin(self, sequence: int) -> None:
        """Begin the operation with this sequence number: keep its messages from now on."""
        self._operations.add(sequence)
        series = sequence >> _SERIES_BITS
        self._newest[series] = max(self._newest[series], sequence)

    def end(self, sequence: int) -> None:
        """End the operation with this sequence number: discard its messages in the inbox and outbox."""
        self._operations.discard(sequence)
        for kept in (self._inbox, self._outbox, self._unasked_bytes):
            for key in [key for key in kept if key[0] == sequence]:
                kept.pop(key)
        self._asked = {key for key in self._asked if key[0] != sequence}
        self.reading = {key for key in self.reading if key[0] != sequence}

    def put(self, sender: int, frame: Frame) -> None:
        """Put a received frame into the inbox; a frame of an ended operation is discarded."""
        if frame.sequence in self._operations or frame.sequence > self._newest[frame.sequence >> _SERIES_BITS]:
            self._inbox[frame.sequence, frame.step].append((sender, frame))

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """Return and remove the received frames of a phase, as pairs (rank that sent the frame, frame)."""
        return self._inbox.pop(key, [])

    def keep_for_above(self, frame: Frame) -> None:
        """Put a frame for the rank above into the outbox."""
        self._outbox.setdefault((frame.sequence, frame.step), []).append(frame)

    def take_back(self, key: Key) -> list[Frame]:
        """Return and remove the frames of a phase in the outbox, which have not been sent."""
        return self._outbox.pop(key, [])

    def asked(self, key: Key) -> None:
        """Note that the rank above is ready to receive large frames of this phase."""
        self._asked.add(key)

    def ready_for_above(self) -> list[Frame]:
        """Return and remove the frames in the outbox that may be sent now.

        These are small frames, and all frames of phases for which the rank above is ready.
        """
        ready: list[Frame] = []
        for key, frames in list(self._outbox.items()):
            if key not in self._asked:
                self._unasked_bytes[key] += sum(len(frame.body) for frame in frames)
                if self._unasked_bytes[key] > _UNASKED_BYTES:
                    continue
            ready += self._outbox.pop(key)
        return ready
