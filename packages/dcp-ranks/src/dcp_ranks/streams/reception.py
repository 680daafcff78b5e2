"""Receive one stream, with payloads placed directly into the handler's memory."""

from __future__ import annotations

import enum
import os
import socket
from typing import Final, Protocol

from dcp_ranks.streams.greetings import descriptors_in
from dcp_ranks.streams.stream import GOODBYE, HEAD, MAX_MESSAGE_BYTES, MESSAGE, Stream

_TURN_BYTES: Final = 8 << 20  # per turn of one stream, so that other streams do not wait
_SCRATCH_BYTES: Final = 256 << 10
_ROOM: Final = socket.CMSG_SPACE(4)

_CLOSED: Final = "its connection ended without a goodbye: its process has ended, or has given up"
_MALFORMED: Final = "it sent bytes that are no message"
_NO_DESCRIPTOR: Final = "a descriptor did not arrive; most likely this process has too many open files (ulimit -n)"


class NotNow(enum.Enum):
    """Type of `NOT_NOW`."""

    NOT_NOW = "not now"


NOT_NOW: Final = NotNow.NOT_NOW
"""Result of `on_message` to get the same message again after `Dispatcher.resume`.

Over TCP, resume within `PeerOptions.peer_timeout_seconds`, or the other kernel ends the connection.
"""


class StreamHandler(Protocol):
    """Functions that a dispatcher calls in its thread. They must not block; they send with `Stream.post`."""

    def on_message(
        self, stream: Stream, message: bytes, payload_bytes: int, descriptor: int | None, /
    ) -> memoryview | NotNow | None:
        """Handle a message. The handler closes the descriptor, unless it returns `NOT_NOW`.

        Returns:
            With a payload, a contiguous writable buffer of `payload_bytes` bytes, not to be used before `on_payload`,
            or None to discard the payload. Without one, None. `NOT_NOW` pauses the stream until `Dispatcher.resume`;
            its sender blocks once the connection's buffers are full.
        """

    def on_payload(self, stream: Stream, message: bytes, buffer: memoryview, /) -> None:
        """Handle a payload, complete in the buffer that `on_message` returned."""

    def on_goodbye(self, stream: Stream, /) -> None:
        """Handle the orderly end of a stream: the other rank neither sends nor receives any more."""

    def on_lost(self, stream: Stream, reason: str, /) -> None:
        """Handle the loss of a stream, once; an incomplete payload's buffer is no longer written to."""


class Reception:
    """Receiving side of one stream, for the dispatcher's thread; no method blocks."""

    def __init__(self, stream: Stream, handler: StreamHandler) -> None:
        self.stream = stream
        self.is_paused = False
        self.end: str | None = None
        """Why the stream has ended; empty after a goodbye, None while it works."""
        self._handler = handler
        self._connection = stream.connection
        self._head = memoryview(bytearray(HEAD.size))
        self._target = self._head
        self._filled = 0
        self._kind = 0
        self._counted = 0
        self._payload_bytes = 0
        self._message: bytes | None = None
        self._payload: memoryview | None = None
        self._to_skip = 0
        self._descriptors: list[int] = []

    def receive(self) -> None:
        """Receive at most 8 MiB, and call the handler; sets `is_paused` or `end`."""
        left = _TURN_BYTES
        while left > 0 and not self.is_paused and self.end is None:
            try:
                count = self._fill()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(f"its connection broke: {error.strerror or error}")
                return
            if not count:
                self._end(_CLOSED)
                return
            left -= count
            self._filled += count
            while self._filled == len(self._target) and not self.is_paused and self.end is None:
                self._complete()

    def resume(self) -> None:
        """Repeat the message for which the handler returned `NOT_NOW`."""
        if self.is_paused and self.end is None:
            self.is_paused = False
            self._hand_over()

    def close(self) -> None:
        """Close descriptors that no handler took; stop writing to a payload's buffer."""
        self._payload = None
        self._target = self._head
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _end(self, reason: str) -> None:
        self.end = "" if self.stream.has_left and reason != _MALFORMED else self.stream.lost or reason

    def _fill(self) -> int:
        room = self._target[self._filled :]
        if self._target is self._head and self.stream.same_host:
            flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            count, ancillary, _, _ = self._connection.recvmsg_into([room], _ROOM, flags)
            self._descriptors += descriptors_in(ancillary)
            return count
        return self._connection.recv_into(room, len(room), socket.MSG_DONTWAIT)

    def _complete(self) -> None:
        if self._target is self._head:
            self._take_head()
        elif self._message is None:
            self._message = bytes(self._target)
            self._hand_over()
        elif self._payload is not None:
            payload, self._payload = self._payload, None
            message = self._message
            self._begin_frame()
            self._handler.on_payload(self.stream, message, payload)
        else:
            self._skip(len(self._target))

    def _begin_frame(self) -> None:
        self._target, self._filled, self._message = self._head, 0, None

    def _take_head(self) -> None:
        self._kind, self._counted, message_bytes, self._payload_bytes = HEAD.unpack(self._head)
        is_goodbye = self._kind == GOODBYE and not (self._counted or message_bytes or self._payload_bytes)
        is_message = self._kind == MESSAGE and self._counted <= 1 and message_bytes <= MAX_MESSAGE_BYTES
        if self.stream.has_left or not (is_goodbye or is_message):
            self._end(_MALFORMED)
        elif len(self._descriptors) != self._counted:
            self._end(_NO_DESCRIPTOR if len(self._descriptors) < self._counted else _MALFORMED)
        elif is_goodbye:
            self._filled = 0
            self.stream.has_left = True
            self._handler.on_goodbye(self.stream)
        else:
            self._target, self._filled = memoryview(bytearray(message_bytes)), 0

    def _hand_over(self) -> None:
        descriptor = self._descriptors[0] if self._descriptors else None
        message = self._message or b""
        buffer = self._handler.on_message(self.stream, message, self._payload_bytes, descriptor)
        if buffer is NOT_NOW:
            self.is_paused = True
            return
        self._descriptors.clear()
        if not self._payload_bytes:
            self._begin_frame()
        elif isinstance(buffer, memoryview):
            self._payload = buffer
            self._target, self._filled = _checked(buffer, self._payload_bytes), 0
        else:
            self._to_skip = self._payload_bytes
            self._skip(0)

    def _skip(self, skipped_bytes: int) -> None:
        self._to_skip -= skipped_bytes
        if self._to_skip:
            self._target, self._filled = memoryview(bytearray(min(self._to_skip, _SCRATCH_BYTES))), 0
        else:
            self._begin_frame()


def _checked(buffer: memoryview, payload_bytes: int) -> memoryview:
    if buffer.readonly or buffer.nbytes != payload_bytes:
        raise ValueError(
            f"the buffer for a payload of {payload_bytes} bytes has {buffer.nbytes}, and is "
            f"{'read-only' if buffer.readonly else 'writable'}; return a writable one of the payload's size"
        )
    return buffer.cast("B")
