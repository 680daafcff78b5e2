"""`ObjectSink`: uploads a small object by one conditional PUT, a large object in parallel parts."""

from __future__ import annotations

from typing import Any

from dcp_io.stores.stream_files import UploadSink
from dcp_object.client import Client

PART_BYTES, UPLOADS = 8 << 20, 4
"""Size of an upload's parts, and how many are sent at the same time, if a storage does not choose them."""
# S3 refuses parts below 5 MiB, and more than 10,000 of them. Larger parts than ours only need more memory.
MIN_PART_BYTES, MAX_PART_BYTES, MAX_PARTS = 5 << 20, 64 << 20, 10_000
# What an object holds between the first part's turn and the end of the upload: a beginning of what it will be.
_RESERVED_BYTES = 16
_STEP_BYTES = 1 << 20


class ObjectSink(UploadSink):
    """Sink that uploads a new object, and never replaces an existing object.

    For uploads in parts (above `part_bytes`), services offer no conditional request. So a conditional PUT of the first
    bytes reserves the key; the whole object replaces these bytes when all parts have arrived.
    """

    def __init__(self, client: Client, name: str, key: str, *, part_bytes: int, uploads: int) -> None:
        super().__init__(name, f"{client.root}/{key}")
        self._client = client
        self._key = key
        self._part_bytes = part_bytes
        self._uploads = uploads
        self._small = bytearray()
        self._writer: Any = None

    def send(self, view: memoryview) -> None:
        """Append bytes. Full parts are uploaded in the background, at most `uploads` at the same time.

        Read-only bytes are copied only if the object is small.
        """
        if self._writer is None and len(self._small) + len(view) <= self._part_bytes:
            self._small += view
        else:
            self._upload(view)

    def _upload(self, view: memoryview) -> None:
        if self.sent_bytes + len(view) > self._part_bytes * MAX_PARTS:
            raise OSError(
                f"{self.place} would need more than {MAX_PARTS} parts of {self._part_bytes} bytes; use more writer "
                "threads or a larger max_inflight_bytes"
            )
        if self._writer is None:
            start = bytes(self._small[:_RESERVED_BYTES]) or bytes(view[:_RESERVED_BYTES])
            self._create(start)
            self._writer = self._client.writer(self._key, part_bytes=self._part_bytes, uploads=self._uploads)
            small, self._small = bytes(self._small), bytearray()
            self._send(small)
        for first in range(0, len(view), _STEP_BYTES):
            # The client keeps what it is given, without a copy, until it has been sent.
            step = view[first : first + _STEP_BYTES]
            self._send(step if step.readonly else bytes(step))

    def _send(self, data: bytes | memoryview) -> None:
        if len(data):
            writer = self._writer
            self._client.once("PUT (a part)", self._key, lambda: writer.write(data))

    def _create(self, data: bytes) -> None:
        def mine() -> bool | None:
            """Return True if an earlier attempt created the object, but its response was lost; otherwise None."""
            try:
                found, _ = self._client.call("GET", self._key, lambda: self._client.get(self._key))
            except FileNotFoundError:
                return None
            return True if found == data else None

        def create() -> bool:
            self.may_exist = True
            self._client.put(self._key, data, "create")
            return True

        try:
            self._client.call("PUT", self._key, create, on_doubt=mine, attempts=self._client.attempts)
        except FileExistsError:
            self.may_exist = False
            raise

    def complete(self) -> None:
        """Complete the upload; the object is then durable and visible to all processes."""
        if self._writer is None:
            self._create(bytes(self._small))
            self._small = bytearray()
        else:
            self._client.once("PUT (complete)", self._key, self._writer.close)

    def give_up(self) -> None:
        """Complete a multipart upload, since obstore cannot abort it; the caller then calls `remove`."""
        self._small = bytearray()
        if self._writer is not None:
            self._writer.close()

    def remove(self) -> None:
        """Remove the object."""
        self._client.call("DELETE", self._key, lambda: self._client.delete(self._key))
