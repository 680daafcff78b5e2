"""`partner`: has the parts of a tier per host copied to the next host. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_io.roots.copy_notes import CopyRequest, HostsCopied

if TYPE_CHECKING:
    from dcp_ranks import Coordinator


@dataclass(frozen=True, slots=True)
class Partner:
    """Copies of hosts' parts of a checkpoint on the next host, for `dcp_tiers.Tier(copies=)`; see `partner`."""

    rate_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        rate = self.rate_bytes_per_second
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if rate is not None and not (is_number and rate > 0):
            raise ValueError(f"rate_bytes_per_second is {rate!r}; it must be a positive number")

    def copy(self, coordinator: Coordinator, request: CopyRequest) -> HostsCopied:
        """See `HostCopies`.

        Ranks: every rank; collective.
        """
        from dcp_memory.partners.copying import copy_to_partners  # noqa: PLC0415 - needs dcp-ranks, and torch

        return copy_to_partners(coordinator, request, rate=self.rate_bytes_per_second)


def partner(rate_bytes_per_second: float | None = None) -> Partner:
    """Return the record that has each host's part of a checkpoint copied to the next host, in the background.

    After each save of a `CheckpointManager`, each host sends the files of its ranks to one other host, over connections
    between the ranks. If a host is lost, its part is read from its partner. Needs dcp-ranks (the extra `partners` of
    dcp-memory).

    Args:
        rate_bytes_per_second: Limit of the rate at which each host sends; None for no limit.

    Raises:
        ValueError: The rate is not positive.

    Example:
        ```python
        from dcp_io import KeepLast
        from dcp_memory import partner
        from dcp_tiers import Tier, Tiers

        near = Tier("/nvme/run", keep=KeepLast(1), per_host=True, copies=partner(rate_bytes_per_second=500e6))
        tiers = Tiers([near, Tier("/shared/run")])
        ```
    """
    return Partner(rate_bytes_per_second)
