"""`PeerOptions`: how ranks watch and reach each other, as users choose it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

__all__ = ["PeerOptions"]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How ranks watch and reach each other; the same on all ranks.

    Attributes:
        peer_timeout_seconds: After how long a host that does not answer counts as gone.
        leaders_above: Up to so many ranks all stand below the coordinator; of more, leaders of hosts stand between.
        fan_out: How many leaders of hosts stand below one.
        network: Ranks take connections on their addresses in this network alone, such as `10.0.0.0/8`; None for that
            over which they reach the store.

    Raises:
        ValueError: `network` is not one.

    Example:
        ```python
        from dcp_core import PeerOptions, save

        peers = PeerOptions(peer_timeout_seconds=60, network="10.0.0.0/8")
        save({"step": 1}, checkpoint_id="step-1", peers=peers)
        ```
    """

    peer_timeout_seconds: float = 120.0
    leaders_above: int = 256
    fan_out: int = 16
    network: str | None = None

    def __post_init__(self) -> None:
        """Check the network."""
        if self.network is not None:
            ipaddress.ip_network(self.network, strict=False)
