"""A folder of a server in this process, past the protocol: for tests that look at what is really there."""

from __future__ import annotations

from dcp_http_example.server import ObjectServer

__all__ = ["RawFolder"]


class RawFolder:
    """Satisfies the `RawFolder` that the conformance suites ask for.

    Args:
        server: Running in this process.
        folder: Name of the folder on it.
    """

    def __init__(self, server: ObjectServer, folder: str) -> None:
        self._server = server
        self._folder = folder

    def names(self) -> list[str]:
        """Names of all objects below the folder."""
        return self._server.names(self._folder)

    def get(self, name: str) -> bytes:
        """All bytes of an object."""
        found = self._server.store.get(f"{self._folder}/{name}")
        if found is None:
            raise FileNotFoundError(name)
        return found.data

    def put(self, name: str, data: bytes) -> None:
        """Make an object, or replace it."""
        self._server.store.put(f"{self._folder}/{name}", data)

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._server.store.delete(f"{self._folder}/{name}")
