"""`HttpSink`: one upload. The body is sent as it comes; the object exists once the last chunk has arrived."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Sequence
from http import HTTPStatus

from dcp_http_example.client import Client, naming
from dcp_io import Sink

__all__ = ["HttpSink"]

_PIECE_BYTES = 1 << 20


class HttpSink(Sink):
    """An object on its way to the server, in chunks of one PUT; it never replaces another.

    Args:
        client: Of the server.
        name: Of the object in its store.
        url: Of the object, for messages.
    """

    def __init__(self, client: Client, name: str, url: str) -> None:
        self._client = client
        self._name = name
        self._url = url
        self._may_exist = False
        self._connection: http.client.HTTPConnection | None = client.connect()
        try:
            with naming(f"PUT {url}"):
                self._connection.putrequest("PUT", client.target(name))
                self._connection.putheader("Transfer-Encoding", "chunked")
                self._connection.putheader("If-None-Match", "*")
                self._connection.endheaders()
        except BaseException:
            self._release()
            raise

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Send the buffers."""
        if self._connection is None:
            raise ValueError(f"{self._url} has been closed")
        with naming(f"PUT {self._url}"):
            for buffer in buffers:
                view = memoryview(buffer)
                for start in range(0, len(view), _PIECE_BYTES):
                    piece = view[start : start + _PIECE_BYTES]
                    self._connection.send(b"%x\r\n" % len(piece))
                    self._connection.send(piece)
                    self._connection.send(b"\r\n")

    def close(self) -> None:
        """Complete the upload."""
        if self._connection is None:
            return
        self._may_exist = True
        try:
            with naming(f"PUT {self._url}"):
                self._connection.send(b"0\r\n\r\n")
                with self._connection.getresponse() as response:
                    status = response.status
        finally:
            self._release()
        if status == HTTPStatus.PRECONDITION_FAILED:
            self._may_exist = False
            raise FileExistsError(f"{self._url} exists: somebody else was faster")
        if status != HTTPStatus.CREATED:
            raise OSError(f"{self._url}: the server answered {status}")

    def abort(self) -> None:
        """Hang up before the end, or remove what has been stored."""
        self._release()
        if self._may_exist:
            self._may_exist = False
            with contextlib.suppress(OSError), self._client.ask("DELETE", self._name):
                pass

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
