"""`ObjectSink`: one object while it is uploaded. Small ones in one conditional PUT, large ones in parallel parts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from dcp_io import Sink
from dcp_manifest.errors import DcpError
from dcp_object.client import Client

__all__ = ["MAX_PARTS", "ObjectSink"]

MAX_PARTS = 10_000
"""Of one object, at most; what S3 allows."""
# What an object holds between the first part's turn and the end of the upload: a beginning of what it will be.
_RESERVED_BYTES = 16
_COPY_BYTES = 1 << 20


class ObjectSink(Sink):
    """An upload that never replaces an object that is there.

    An object of more than `part_bytes` is uploaded in parts, which services do not do conditionally: its name is taken
    first, by a conditional PUT of its first bytes, and replaced by the whole object when all parts have arrived.

    Args:
        client: Of the container.
        name: Of the object in its store.
        key: Of the object in the container.
        part_bytes: Size of a part. At most `uploads` + 2 parts are in memory.
        uploads: Parts that are uploaded at a time.
    """

    def __init__(self, client: Client, name: str, key: str, *, part_bytes: int, uploads: int) -> None:
        self._client = client
        self._name = name
        self._key = key
        self._part_bytes = part_bytes
        self._uploads = uploads
        self._position = 0
        self._small = bytearray()
        self._writer: Any = None
        self._ended = False
        self._may_exist = False

    @property
    def name(self) -> str:
        """Name of the object in its store."""
        return self._name

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._position

    def write(self, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
        """Copy the buffers; full parts are uploaded meanwhile, and waited for if too many are under way."""
        if self._ended:
            raise ValueError(f"{self._client.root}/{self._key} has been closed")
        for buffer in buffers:
            view = memoryview(buffer)
            if self._writer is None and len(self._small) + len(view) <= self._part_bytes:
                self._small += view
            else:
                self._upload(view)
            self._position += len(view)

    def _upload(self, view: memoryview) -> None:
        if self._position + len(view) > self._part_bytes * MAX_PARTS:
            raise OSError(
                f"{self._client.root}/{self._key} would need more than {MAX_PARTS} parts of {self._part_bytes} bytes; "
                "use more writer threads or a larger max_inflight_bytes"
            )
        if self._writer is None:
            start = bytes(self._small[:_RESERVED_BYTES]) or bytes(view[:_RESERVED_BYTES])
            self._create(start)
            self._writer = self._client.writer(self._key, part_bytes=self._part_bytes, uploads=self._uploads)
            small, self._small = bytes(self._small), bytearray()
            self._send(small)
        for first in range(0, len(view), _COPY_BYTES):
            # The client keeps what it is given, without a copy, until it has been sent.
            self._send(bytes(view[first : first + _COPY_BYTES]))

    def _send(self, data: bytes) -> None:
        if data:
            writer = self._writer
            self._client.once("PUT (a part)", self._key, lambda: writer.write(data))

    def _create(self, data: bytes) -> None:
        """Make the object, if nobody else has made it."""

        def mine() -> bool | None:
            """Whether an earlier attempt, whose answer was lost, has made it after all."""
            try:
                return (
                    True
                    if self._client.call("GET", self._key, lambda: self._client.get(self._key))[0] == data
                    else None
                )
            except FileNotFoundError:
                return None

        def create() -> bool:
            self._may_exist = True
            self._client.put(self._key, data, "create")
            return True

        try:
            self._client.call("PUT", self._key, create, on_doubt=mine, attempts=self._client.attempts)
        except FileExistsError:
            self._may_exist = False
            raise

    def close(self, *, sync: bool) -> None:
        """Complete the upload: once it is acknowledged the object is durable and seen by all."""
        del sync
        if self._ended:
            return
        self._ended = True
        if self._writer is None:
            self._create(bytes(self._small))
            self._small = bytearray()
        else:
            writer = self._writer
            self._client.once("PUT (complete)", self._key, writer.close)

    def abort(self) -> None:
        """Remove what has been stored. An upload in parts is ended by completing it: there is no other way here."""
        if not self._ended:
            self._ended = True
            if self._writer is not None:
                with contextlib.suppress(Exception):
                    self._writer.close()
        self._small = bytearray()
        if self._may_exist:
            with contextlib.suppress(OSError, DcpError):
                self._client.call("DELETE", self._key, lambda: self._client.delete(self._key))
            self._may_exist = False
