"""`HostCopies`: protocol of what copies each host's part of a checkpoint to other hosts; see `dcp_tiers.Tier(copies=)`.

Not in this module: when a checkpoint is copied, which the manager decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dcp_io.stores.host_store import HostStore

__all__ = ["CopyRequest", "HostCopies", "HostsCopied"]


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One rank's view of a checkpoint that is to be copied."""

    store: HostStore
    """This host's folder of the checkpoint."""
    leaders: Sequence[int]
    """For each rank, the rank that looks after the store of its host."""
    is_cancelled: Callable[[], bool]
    """Function that says whether the copy is not wanted any more; it is called from time to time."""
    peers: Any = None
    """Options of the connections between ranks (`dcp_ranks.PeerOptions`); None for the defaults."""


@dataclass(frozen=True, slots=True)
class HostsCopied:
    """Outcome of a copy, the same on all ranks but for the bytes."""

    reason: str | None = None
    """Why the checkpoint is not protected, as a clause; None if it is."""
    bytes_sent: int = 0
    """Number of bytes that this rank has sent to another host."""

    @property
    def protected(self) -> bool:
        """Whether each host's part is on another host, too."""
        return self.reason is None


@runtime_checkable
class HostCopies(Protocol):
    """Protocol of a way to keep copies of each host's part of a checkpoint on other hosts."""

    def copy(self, coordinator: Any, request: CopyRequest) -> HostsCopied:
        """Copy what each host has written of a checkpoint, and note it beside the checkpoint (see `CopyNote`).

        Args:
            coordinator: Coordinator of this copy (`dcp_ranks.Coordinator`), which the caller closes.
            request: What is to be copied.

        Raises:
            Exception: A rank was lost or failed; the copy counts as failed.

        Ranks: every rank; collective, in a thread of its own.
        """
        ...
