"""Runs the server until standard input ends; prints its port first. An argument is the address to listen on."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

from integration_tests.benchmarks.loopback_s3.http import Connection
from integration_tests.benchmarks.loopback_s3.service import Service


def _serve(peer: socket.socket, service: Service) -> None:
    with contextlib.suppress(OSError), peer:
        connection = Connection(peer)
        while (request := connection.receive()) is not None:
            answer = service.answer(request)
            body = () if request.method == "HEAD" else answer.body
            connection.answer(answer.status, answer.headers, body, answer.size)


def _accept(listener: socket.socket, service: Service) -> None:
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_serve, args=(peer, service), daemon=True).start()


def main() -> None:
    """Serve."""
    listener = socket.create_server((sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1", 0), backlog=128)
    threading.Thread(target=_accept, args=(listener, Service()), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()
    os._exit(0)  # connections may still be open


if __name__ == "__main__":
    main()
