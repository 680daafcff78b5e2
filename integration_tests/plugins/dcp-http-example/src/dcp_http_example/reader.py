"""`HttpReader`: loads from the server."""

from __future__ import annotations

import os

from dcp_core import ByteStorageReader
from dcp_http_example.address import is_address, parse_address
from dcp_http_example.store import HttpStore
from dcp_io import StoreBackend, Verify

__all__ = ["HttpReader"]


class HttpReader(ByteStorageReader):
    """Loads from a folder of a server, checking every byte that a value depends on.

    Args:
        checkpoint_id: `http+dcp://host:port/folder`.
        verify: See `dcp_io.Verify`.
        thread_count: Reader threads of this rank.
    """

    def __init__(
        self, checkpoint_id: str | os.PathLike[str], *, verify: Verify = "blocks", thread_count: int = 2
    ) -> None:
        self.verify: Verify = verify
        self.thread_count = thread_count
        super().__init__(checkpoint_id)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        return StoreBackend(HttpStore(parse_address(checkpoint_id)), threads=self.thread_count, verify=self.verify)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id has this storage's scheme."""
        return is_address(checkpoint_id)
