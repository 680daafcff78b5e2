"""What a byte engine offers to the storages in `storage_writer` and `storage_reader`.

The contract is structural: `dcp_io.StoreBackend` satisfies it for any `dcp_io.Store` without this package importing
it. A new kind of storage implements a `dcp_io.Store` and wraps it; it rarely needs to implement this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.items import StoredItem
from dcp_manifest.requests import ReadRequest, ReadStats, Writable

__all__ = ["ByteBackend"]


class ByteBackend(Protocol):
    """One checkpoint's folder, seen as named byte objects with a life cycle.

    Guarantees of the save methods together: until `publish` of the index returns, the folder holds exactly the old
    checkpoint; from then on exactly the new one. `finish_save` and `abort_save` only remove what nobody needs.
    """

    @property
    def url(self) -> str:
        """The folder's name in messages."""
        ...

    @property
    def generation(self) -> int:
        """Generation of the running save: one more than that of any index found at its start."""
        ...

    @property
    def changed_keys(self) -> Collection[str]:
        """Keys whose destination the last `read` may have changed, also if it failed."""
        ...

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """Make the folder, refuse a second live save, clear away dead ones; the new save's id. Coordinator.

        `save_id` is an id that no save has used; None takes a new one.
        """
        ...

    def join_save(self, save_id: str) -> None:
        """Take part in a save that the coordinator began. Every other rank."""
        ...

    def begin_rank_local_save(self, save_id: str, rank: int, *, overwrite: bool) -> None:
        """Take part in a save without a coordinator. Every rank, with one agreed id."""
        ...

    def write(self, requests: Sequence[Writable], *, prefix: str, save_id: str) -> Sequence[StoredItem]:
        """Write items; they are durable on return, in the order of `requests`. Every rank."""
        ...

    def publish(self, name: str, data: bytes) -> None:
        """Make `name` hold `data`: at once, durably, or not at all."""
        ...

    def finish_save(self, keep: Collection[str]) -> None:
        """End a published save: remove what the new index does not name (`keep`), then the marker."""
        ...

    def abort_save(self) -> None:
        """End a failed save: remove what it wrote. Never touches anything published. Every rank."""
        ...

    def read_index(self) -> CheckpointIndex:
        """The newest complete index in the folder. Raises CheckpointNotFoundError if there is none."""
        ...

    def read(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Read and verify ranges of stored items."""
        ...
