"""Mailbox for frames of operations and phases that share connections: frames are kept until their phase fetches them.

Not in this module: connections.
"""

from __future__ import annotations

from collections import defaultdict

from dcp_ranks.transport.connection import Frame

__all__ = ["Key", "Mail"]

Key = tuple[int, int]
"""A phase: the operation's sequence number, and the step within it."""

# Size that fits into the buffers of a connection: larger frames are sent only to a rank that is reading. A busy rank
# takes no bytes, and a kernel gives up on a connection that takes none for the peer timeout.
_UNASKED_BYTES = 16 << 10


class Mail:
    """Inbox and outbox of frames, by phase. Not thread-safe: the caller holds a lock."""

    def __init__(self) -> None:
        self._inbox: defaultdict[Key, list[tuple[int, Frame]]] = defaultdict(list)
        self._outbox: dict[Key, list[Frame]] = {}
        self._unasked_bytes: defaultdict[Key, int] = defaultdict(int)
        self._asked: set[Key] = set()
        self._operations: set[int] = set()
        self._newest = 0
        self.reading: set[Key] = set()
        """The phases in which this rank reads."""

    def begin(self, sequence: int) -> None:
        """Begin an operation on this rank: keep its frames."""
        self._operations.add(sequence)
        self._newest = max(self._newest, sequence)

    def end(self, sequence: int) -> None:
        """End an operation on this rank: drop its frames."""
        self._operations.discard(sequence)
        for kept in (self._inbox, self._outbox, self._unasked_bytes):
            for key in [key for key in kept if key[0] == sequence]:
                kept.pop(key)
        self._asked = {key for key in self._asked if key[0] != sequence}
        self.reading = {key for key in self.reading if key[0] != sequence}

    def put(self, sender: int, frame: Frame) -> None:
        """Keep a frame, unless its operation has ended."""
        if frame.sequence in self._operations or frame.sequence > self._newest:
            self._inbox[frame.sequence, frame.step].append((sender, frame))

    def take(self, key: Key) -> list[tuple[int, Frame]]:
        """Return the frames that have arrived for a phase, each with the neighbour that sent it."""
        return self._inbox.pop(key, [])

    def keep_for_above(self, frame: Frame) -> None:
        """Queue a frame for the rank above."""
        self._outbox.setdefault((frame.sequence, frame.step), []).append(frame)

    def take_back(self, key: Key) -> list[Frame]:
        """Return the frames queued for the rank above in a phase that were not sent, and drop them."""
        return self._outbox.pop(key, [])

    def asked(self, key: Key) -> None:
        """Mark that the rank above reads in this phase."""
        self._asked.add(key)

    def ready_for_above(self) -> list[Frame]:
        """Return the frames that the rank above will take now, small or requested; they are removed."""
        ready: list[Frame] = []
        for key, frames in list(self._outbox.items()):
            if key not in self._asked:
                self._unasked_bytes[key] += sum(len(frame.body) for frame in frames)
                if self._unasked_bytes[key] > _UNASKED_BYTES:
                    continue
            ready += self._outbox.pop(key)
        return ready
