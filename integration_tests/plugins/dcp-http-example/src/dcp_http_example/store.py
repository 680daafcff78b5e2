"""`HttpStore`: a folder of objects on the server as a `dcp_io.Store`. Planning and checkpoints are unknown here."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any

from dcp_http_example.address import Address
from dcp_http_example.client import Client
from dcp_http_example.sink import HttpSink
from dcp_io import Entry, RequestSource, Sink, Source, SupportsFolders, check_name
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["HttpStore"]


class HttpStore(SupportsFolders):
    """Objects of a server below one prefix.

    Guarantees: as `Store`, but nothing survives the server. An object appears when its whole body has arrived, so
    `publish` needs no temporary object, and readers never see a part of one.

    Args:
        address: Server and folder. Nothing is asked of the server before the first method is called.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = Client(address)

    @property
    def url(self) -> str:
        """The folder's checkpoint id."""
        return self._address.url

    def make(self) -> None:
        """Do nothing: folders are beginnings of names here."""

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Begin an upload. The server keeps nothing on disks, so there is nothing to sync."""
        del sync
        if self.exists(name):
            raise FileExistsError(f"{self.url}/{name} exists")
        return HttpSink(self._client, name, f"{self.url}/{name}")

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Replace the object by one PUT."""
        del tag, sync
        self._put(name, bytes(data), {})

    def touch(self, name: str) -> None:
        """Put the same bytes again, if they are still there."""
        with self._client.ask("GET", check_name(name)) as response:
            self._found(response, name)
            data, etag = response.read(), response.headers["ETag"]
        if not self._put(name, data, {"If-Match": etag}) and not self.exists(name):
            raise self._missing(name)

    def read(self, name: str) -> bytes:
        """All bytes of the object."""
        with self._client.ask("GET", check_name(name)) as response:
            self._found(response, name)
            return response.read()

    def open(self, name: str) -> Source:
        """The object; each read of it is a request."""
        check_name(name)
        return RequestSource(partial(self.size, name), partial(self._read_range, name))

    def _read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` by one GET of a range."""
        if not len(buffer):
            self.size(name)
            return
        last = offset + len(buffer) - 1
        with self._client.ask("GET", check_name(name), headers={"Range": f"bytes={offset}-{last}"}) as response:
            if response.status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                self._found(response, name)
            if response.status != HTTPStatus.PARTIAL_CONTENT or response.length != len(buffer):
                raise CorruptCheckpointError(
                    f"the object ends before byte {last + 1}, which is needed: it is truncated",
                    file=name,
                    offset=offset,
                )
            _receive(response, buffer)

    def size(self, name: str) -> int:
        """Bytes of the object."""
        with self._client.ask("HEAD", check_name(name)) as response:
            self._found(response, name)
            return int(response.headers["Content-Length"])

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        with self._client.ask("HEAD", check_name(name)) as response:
            return response.status == HTTPStatus.OK

    def child(self, name: str) -> HttpStore:
        """The folder of that name."""
        return HttpStore(replace(self._address, folder=f"{self._address.folder}/{check_name(name)}"))

    def folders(self) -> tuple[str, ...]:
        """The first parts of the names that have several."""
        return tuple(sorted({name.partition("/")[0] for name, _ in self._below() if "/" in name}))

    def list(self) -> list[Entry]:
        """The objects directly in the folder, page by page."""
        return [Entry(name, item["bytes"], item["mtime"]) for name, item in self._below() if "/" not in name]

    def _below(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and facts of every object below the folder."""
        prefix = f"{self._address.folder}/"
        after, more = "", True
        while more:
            objects, more = self._client.page(after)
            for item in objects:
                after = item["path"]
                yield after.removeprefix(prefix), item

    def delete(self, name: str) -> None:
        """Remove the object."""
        with self._client.ask("DELETE", check_name(name)):
            pass

    def sync_folder(self) -> None:
        """Do nothing: what the server has acknowledged is there for everybody."""

    def _put(self, name: str, data: bytes, headers: dict[str, str]) -> bool:
        """Store an object; whether its condition held."""
        with self._client.ask("PUT", check_name(name), data, headers) as response:
            return response.status == HTTPStatus.CREATED

    def _found(self, response: http.client.HTTPResponse, name: str) -> None:
        if response.status == HTTPStatus.NOT_FOUND:
            raise self._missing(name)
        if response.status not in (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT):
            raise OSError(f"{self.url}/{name}: the server answered {response.status} {response.reason}")

    def _missing(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"{self.url}/{name} is missing; the checkpoint is incomplete or was removed")


def _receive(response: http.client.HTTPResponse, buffer: memoryview) -> None:
    """Fill the buffer with the body."""
    read = 0
    while read < len(buffer):
        count = response.readinto(buffer[read:])
        if not count:
            raise ConnectionError(f"the connection ended after {read} of {len(buffer)} bytes")
        read += count
