"""`HttpWriter`: saves to the server."""

from __future__ import annotations

import os

from dcp_core import ByteStorageWriter
from dcp_http_example.address import is_address, parse_address
from dcp_http_example.store import HttpStore
from dcp_io import STALE_AFTER_SECONDS, Layout, StoreBackend

__all__ = ["HttpWriter"]


class HttpWriter(ByteStorageWriter):
    """Saves to a folder of a server; the old checkpoint in it stays loadable until the new one is published.

    Args:
        checkpoint_id: `http+dcp://host:port/folder`.
        overwrite: Whether a checkpoint that is already there may be replaced.
        layout: `torch` or `raw`, see `dcp_io.Layout`.
        thread_count: Writer threads of this rank.
        stale_after_seconds: After this long without a sign of life a save of another host counts as dead.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        layout: Layout = "torch",
        thread_count: int = 2,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
    ) -> None:
        self.layout: Layout = layout
        self.thread_count = thread_count
        self.stale_after_seconds = stale_after_seconds
        super().__init__(checkpoint_id, overwrite=overwrite)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        return StoreBackend(
            HttpStore(parse_address(checkpoint_id)),
            layout=self.layout,
            threads=self.thread_count,
            stale_after_seconds=self.stale_after_seconds,
        )

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id has this storage's scheme."""
        return is_address(checkpoint_id)
