"""`S3Server`: moto's S3 server in a child process. Needs `moto[s3]` and flask."""

from __future__ import annotations

import contextlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import ClassVar

__all__ = ["CREDENTIALS", "S3Server"]

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test-secret", "AWS_REGION": "us-east-1"}

_START_TIMEOUT_SECONDS = 60.0
_END_TIMEOUT_SECONDS = 60.0
_PAGE_OBJECTS = 100
# Moto checks a condition and stores the object in two steps, so a lock keeps other changes out in between. Parts of an
# upload need no lock, as they change nothing until it is completed. A body is read before the lock is taken, since
# its sender may be slow.
_SERVE = """
import contextlib, io, sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
application, lock = DomainDispatcherApplication(create_backend_app), threading.Lock()

class Quiet(WSGIRequestHandler):
    def log(self, *args): pass

def serve(environ, start_response):
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    if method in ("GET", "HEAD") or method == "PUT" and "uploadId=" in query:
        return application(environ, start_response)
    if length := int(environ.get("CONTENT_LENGTH") or 0):
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(length))
    with lock:
        return application(environ, start_response)

server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
server.serve_forever()
"""


class S3Server:
    """S3 server in a child process, with a new bucket; a context manager."""

    command: ClassVar[Sequence[str]] = (sys.executable, "-W", "ignore", "-c", _SERVE)
    """Command of the server, which prints its port, and exits when its standard input is closed."""

    def __init__(self, bucket: str = "bucket") -> None:
        self.bucket = bucket
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(_PAGE_OBJECTS)},
            text=True,
        )
        if self._process.stdout is None:
            raise RuntimeError("the server has no output")
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(_END_TIMEOUT_SECONDS)
            raise RuntimeError(f"the server ended with {status}; is moto[s3] installed, and flask?")
        self.port = int(line)
        self._make_bucket()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Return variables by which AWS clients find the server, or the proxy at `url`."""
        address = url or self.url
        return {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": address,
            "AWS_ALLOW_HTTP": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @contextlib.contextmanager
    def in_environment(self) -> Iterator[None]:
        """Context manager that sets these variables, and clears the cache of s3fs."""
        before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())
        _forget_file_systems()
        try:
            yield
        finally:
            _forget_file_systems()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(_END_TIMEOUT_SECONDS)

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_bucket(self) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("PUT", f"/{self.bucket}")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise
            finally:
                connection.close()
            time.sleep(0.05)


def _forget_file_systems() -> None:
    if "s3fs" in sys.modules:
        sys.modules["s3fs"].S3FileSystem.clear_instance_cache()
