"""`FaultProxy`: an HTTP proxy on loopback that injects faults."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

__all__ = ["Fault", "FaultProxy", "sometimes"]

Fault = Literal["503", "503 after", "drop", "drop after", "truncate", "slow"]
"""Fault of one HTTP request. `503`: the client gets this status, the server gets no request. `503 after`: the server
carries the request out, the client gets 503. `drop`, `drop after`: likewise, but the connection closes without a
response. `truncate`: half of the response body arrives. `slow`: a pause before the response.
"""

_SLOW_SECONDS = 0.2
_HOP_HEADERS = frozenset({"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "proxy-connection"})
_BODY_503 = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Slow down.</Message></Error>"


def sometimes(faults: tuple[Fault, ...], *, rate: float, seed: int) -> Callable[[str, str], Fault | None]:
    """Return a `decide` function: random faults at a rate from 0 to 1, at most two in a row per method and path."""
    dice, lock = random.Random(seed), threading.Lock()
    in_a_row: Counter[tuple[str, str]] = Counter()

    def decide(method: str, path: str) -> Fault | None:
        with lock:
            place = (method, path)
            if dice.random() >= rate or in_a_row[place] >= 2:
                in_a_row[place] = 0
                return None
            in_a_row[place] += 1
            return dice.choice(faults)

    return decide


def _never(method: str, path: str) -> Fault | None:
    del method, path
    return None


class FaultProxy:
    """HTTP proxy in front of a server (URL `upstream`); a context manager.

    `decide` maps (method, path) to the fault to inject, or None. It may be replaced at any time.
    """

    def __init__(self, upstream: str, decide: Callable[[str, str], Fault | None] | None = None) -> None:
        parts = urlsplit(upstream)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.decide = decide or _never
        self.requests: Counter[str] = Counter()
        """By method."""
        self.faults: Counter[str] = Counter()
        """By kind."""
        self.bytes_given = 0
        """Bytes in the bodies of responses to GET."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(proxy) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has a `self` of its own
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
                del format, args

            def handle_any(self) -> None:
                with contextlib.suppress(ConnectionError):
                    proxy._answer(self)

        for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.handle_any)
        return Handler

    def _answer(self, client: BaseHTTPRequestHandler) -> None:
        fault = self.decide(client.command, client.path)
        body = client.rfile.read(int(client.headers.get("Content-Length") or 0))
        with self._lock:
            self.requests[client.command] += 1
            if fault is not None:
                self.faults[fault] += 1
        if fault == "drop":
            client.close_connection = True
            return
        if fault == "503":
            _send(client, 503, {"Content-Type": "application/xml"}, _BODY_503)
            return
        if fault == "slow":
            time.sleep(_SLOW_SECONDS)
        status, headers, answer = self._ask(client, body)
        if fault == "drop after":
            client.close_connection = True
        elif fault == "503 after":
            _send(client, 503, {"Content-Type": "application/xml"}, _BODY_503)
        else:
            with self._lock:
                self.bytes_given += len(answer) if client.command == "GET" else 0
            _send(client, status, headers, answer, truncate=fault == "truncate")

    def _ask(self, client: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=60)
        try:
            headers = {name: value for name, value in client.headers.items() if name.lower() not in _HOP_HEADERS}
            connection.request(client.command, client.path, body, headers)
            with connection.getresponse() as response:
                answer = response.read()
                given = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_HEADERS}
                return response.status, given, answer
        finally:
            connection.close()


def _send(
    client: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, truncate: bool = False
) -> None:
    client.send_response_only(status)
    for name, value in headers.items():
        if name.lower() != "content-length" or client.command == "HEAD":
            client.send_header(name, value)
    if client.command != "HEAD":
        client.send_header("Content-Length", str(len(body)))
    client.end_headers()
    if client.command != "HEAD":
        client.wfile.write(body[: len(body) // 2] if truncate else body)
    client.wfile.flush()
    if truncate:
        client.close_connection = True
