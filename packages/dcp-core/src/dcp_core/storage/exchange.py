"""`Exchange`: the contract of plug-ins by which the ranks of a load read each stored byte once, and pass it on.

The read requests of a rank are in a `PreparedRead`. Not in this module: whether ranks read together (see
`cooperation`), and the exchange itself, which is a plug-in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dcp_io.engine import StoreBackend
from dcp_io.requests import ReadRequest, ReadStats
from dcp_ranks import Coordinator, PeerOptions

__all__ = ["Exchange", "Exchanged", "PreparedRead"]


@dataclass(frozen=True, slots=True)
class PreparedRead:
    """The read requests of one rank's plan, and the backend that would read them for this rank alone."""

    backend: StoreBackend
    requests: Sequence[ReadRequest]
    note_changes: Callable[[Exception], None]
    """Adds to an error that ended the read a note about the values that may have changed already."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What an exchange has done on one rank."""

    stats: ReadStats
    alone: str | None = None
    """Reason why each rank read for itself after all, as a clause; None if the ranks have read together."""
    replaced: bool = False
    """Whether a newer save has replaced the checkpoint meanwhile, so that the load must be planned again; the same on
    all ranks."""


class Exchange(Protocol):
    """Function of a plug-in (hook `dcp_register_exchange`) by which the ranks of a load read their plans together."""

    def __call__(
        self,
        coordinator: Coordinator,
        prepare: Callable[[], PreparedRead],
        *,
        timeout_seconds: float,
        peers: PeerOptions | None,
    ) -> Exchanged:
        """Read and deliver the requests of all ranks.

        Args:
            coordinator: Coordinator of the load, for the exchange's own phases.
            prepare: Function that returns this rank's requests; called within a phase, and again for another attempt.
            timeout_seconds: Time without news from other ranks after which a rank gives up.
            peers: Options for connections between ranks; None for the defaults.

        Raises:
            CheckpointException: A read failed on some rank; raised on all ranks.

        Ranks: every rank; collective.
        """
        ...
