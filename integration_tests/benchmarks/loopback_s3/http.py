"""As much of HTTP/1.1 as clients of S3 speak: requests with bodies of known length or in chunks, kept connections.

Bodies are received and sent by single calls that do not hold the interpreter's lock: what the server costs is what
the kernel takes to copy.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = ["Connection", "Request"]

_HEAD_BYTES = 64 << 10
_PAGES_FROM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """A request line, headers with lower-case names, and the body."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: memoryview


class Connection:
    """One client's connection."""

    def __init__(self, peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._peer = peer
        self._rest = b""

    def receive(self) -> Request | None:
        """The next request; None if the client has hung up."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if headers.get("expect", "").lower() == "100-continue":
            self._peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        split = urlsplit(target)
        query = dict(parse_qsl(split.query, keep_blank_values=True))
        return Request(method, unquote(split.path), query, headers, self._body(headers))

    def answer(self, status: str, headers: Mapping[str, str], body: Iterable[bytes | memoryview], size: int) -> None:
        """Send a response of `size` bytes; to a HEAD `body` is empty all the same."""
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode("latin-1")
        pieces = iter(body)
        first = next(pieces, None)
        if first is not None and len(first) < _HEAD_BYTES:
            head, first = head + bytes(first), None
        self._peer.sendall(head)
        if first is not None:
            self._peer.sendall(first)
        for piece in pieces:
            self._peer.sendall(piece)

    def _body(self, headers: Mapping[str, str]) -> memoryview:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._chunks()
        else:
            body = self._exactly(int(headers.get("content-length", 0)))
        if "aws-chunked" in headers.get("content-encoding", "") or headers.get("x-amz-content-sha256", "").startswith(
            "STREAMING-"
        ):
            return _without_frames(body, int(headers["x-amz-decoded-content-length"]))
        return body

    def _chunks(self) -> memoryview:
        found = bytearray()
        while True:
            line = self._until(b"\r\n")
            if line is None:
                raise ConnectionError("the client hung up within a chunk")
            size = int(line.partition(b";")[0], 16)
            found += self._exactly(size + 2)[:size]
            if not size:
                return memoryview(found)

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._rest:
            more = self._peer.recv(_HEAD_BYTES)
            if not more:
                return None
            self._rest += more
        found, _, self._rest = self._rest.partition(mark)
        return found

    def _exactly(self, size: int) -> memoryview:
        # Pages come straight from the kernel, and go back to it when the object is gone.
        view = memoryview(mmap.mmap(-1, size) if size >= _PAGES_FROM_BYTES else bytearray(size))
        taken = min(size, len(self._rest))
        view[:taken], self._rest = self._rest[:taken], self._rest[taken:]
        while taken < size:
            count = self._peer.recv_into(view[taken:], size - taken, socket.MSG_WAITALL)
            if not count:
                raise ConnectionError("the client hung up within a body")
            taken += count
        return view


def _without_frames(body: memoryview, size: int) -> memoryview:
    """What is inside the frames of `aws-chunked`, which follow one another: length, signature, bytes."""
    found, filled, position = memoryview(bytearray(size)), 0, 0
    while True:
        line = bytes(body[position : position + 200]).partition(b"\r\n")[0]
        count = int(line.partition(b";")[0], 16)
        position += len(line) + 2
        if not count:
            return found[:filled]
        found[filled : filled + count] = body[position : position + count]
        filled += count
        position += count + 2
