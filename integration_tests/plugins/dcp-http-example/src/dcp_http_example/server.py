"""A small HTTP object server for tests: whole objects, ranges, conditions, slow listing in pages. Nothing is durable.

Like the object stores it stands for, it has neither rename nor append: an object appears whole, when all of its bytes
have arrived, or not at all. Run it with `python -m dcp_http_example.server [port]`.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["ObjectServer", "StoredObject"]

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of an object."""

    data: bytes
    mtime: float
    etag: str


@dataclass(slots=True)
class _Objects:
    """All objects, by their path without the first slash. Each method is one step."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    versions: itertools.count[int] = field(default_factory=itertools.count)

    def put(self, path: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> bool:
        """Replace an object, if the condition holds."""
        with self.lock:
            old = self.objects.get(path)
            if (if_absent and old is not None) or (if_match is not None and (old is None or old.etag != if_match)):
                return False
            self.objects[path] = StoredObject(data, time.time(), f'"{next(self.versions)}"')
            return True

    def get(self, path: str) -> StoredObject | None:
        with self.lock:
            return self.objects.get(path)

    def delete(self, path: str) -> None:
        with self.lock:
            self.objects.pop(path, None)

    def page(self, prefix: str, after: str, limit: int) -> tuple[list[tuple[str, StoredObject]], bool]:
        """The next objects below a prefix in the order of their paths, and whether more follow."""
        with self.lock:
            paths = sorted(path for path in self.objects if path.startswith(prefix) and path > after)
            return [(path, self.objects[path]) for path in paths[:limit]], len(paths) > limit


class ObjectServer:
    """The server in a thread of this process; other processes reach it over loopback.

    Args:
        port: 0 takes a free one.
        latency_seconds: Of every request.
        list_latency_seconds: Of every page of a listing, in addition.
        page_objects: Objects in a page of a listing.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        latency_seconds: float = 0.0,
        list_latency_seconds: float = 0.0,
        page_objects: int = 1000,
    ) -> None:
        self.latency_seconds = latency_seconds
        self.list_latency_seconds = list_latency_seconds
        self.page_objects = page_objects
        self.bytes_sent = 0
        """Bytes of objects sent so far."""
        self.pages_sent = 0
        self.store = _Objects()
        self._http = _Server(("127.0.0.1", port), self)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="objects", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        return int(self._http.server_address[1])

    def url(self, folder: str) -> str:
        """The checkpoint id of a folder on this server."""
        return f"http+dcp://127.0.0.1:{self.port}/{folder}"

    def names(self, folder: str) -> list[str]:
        """Names of the objects in a folder, past the protocol."""
        with self.store.lock:
            paths = list(self.store.objects)
        return sorted(path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/"))

    def __enter__(self) -> ObjectServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], owner: ObjectServer) -> None:
        self.owner = owner
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away in the middle of a request is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the parameter's name in the base class
        """Be quiet."""

    def do_PUT(self) -> None:
        """Store an object, once all of it is here."""
        data = self._body()
        if data is None:  # the client gave up
            self.close_connection = True
            return
        stored = self._owner.store.put(
            self._path(),
            data,
            if_absent=self.headers.get("If-None-Match") == "*",
            if_match=self.headers.get("If-Match"),
        )
        self._answer(HTTPStatus.CREATED if stored else HTTPStatus.PRECONDITION_FAILED)

    def do_GET(self) -> None:
        """Send an object or a range of it, or a page of a listing."""
        if urlsplit(self.path).query:
            self._list()
            return
        found = self._owner.store.get(self._path())
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
            return
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted is None:
            self._send(HTTPStatus.OK, found, found.data)
            return
        start, last = int(wanted[1]), int(wanted[2])
        if start >= len(found.data) or last < start:
            self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        else:
            self._send(HTTPStatus.PARTIAL_CONTENT, found, found.data[start : last + 1])

    def do_HEAD(self) -> None:
        """Say how long an object is."""
        found = self._owner.store.get(self._path())
        if found is None:
            self._answer(HTTPStatus.NOT_FOUND)
        else:
            self._answer(HTTPStatus.OK, length=len(found.data), etag=found.etag)

    def do_DELETE(self) -> None:
        """Remove an object, if it is there."""
        self._owner.store.delete(self._path())
        self._answer(HTTPStatus.NO_CONTENT)

    @property
    def _owner(self) -> ObjectServer:
        return self.server.owner

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix("/")

    def _body(self) -> bytes | None:
        """The request's body; None if the client went away in the middle of it."""
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            length = int(self.headers.get("Content-Length", "0"))
            data = self.rfile.read(length)
            return data if len(data) == length else None
        parts = []
        while size := self._chunk_size():
            part = self.rfile.read(size + 2)
            if len(part) < size + 2:
                return None
            parts.append(part[:-2])
        return None if size is None or self.rfile.readline() != b"\r\n" else b"".join(parts)

    def _chunk_size(self) -> int | None:
        line = self.rfile.readline()
        return int(line, 16) if line.endswith(b"\r\n") else None

    def _list(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        time.sleep(self._owner.list_latency_seconds)
        found, more = self._owner.store.page(query["prefix"][0], query["after"][0], self._owner.page_objects)
        objects = [{"path": path, "bytes": len(item.data), "mtime": item.mtime} for path, item in found]
        self._owner.pages_sent += 1
        self._answer(HTTPStatus.OK, json.dumps({"objects": objects, "more": more}).encode())

    def _send(self, status: HTTPStatus, found: StoredObject, data: bytes) -> None:
        with self._owner.store.lock:
            self._owner.bytes_sent += len(data)
        self._answer(status, data, etag=found.etag)

    def _answer(self, status: HTTPStatus, body: bytes = b"", *, length: int | None = None, etag: str = "") -> None:
        time.sleep(self._owner.latency_seconds)
        self.send_response(status)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(body) if length is None else length))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if body:
            self.wfile.write(body)


if __name__ == "__main__":
    with ObjectServer(int(sys.argv[1]) if len(sys.argv) > 1 else 0, page_objects=100) as server:
        print(server.url("<folder>"), flush=True)
        threading.Event().wait()
