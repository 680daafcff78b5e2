"""`PeerOptions`: the user's options for how ranks watch and reach each other."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

__all__ = ["PeerOptions"]


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options for how ranks watch and reach each other; the same on all ranks.

    Attributes:
        peer_timeout_seconds: Time after which a host that does not answer counts as lost.
        leaders_above: Largest number of ranks that are all directly below the coordinator in the tree of messages; in
            larger groups one rank of each host, its leader, is in between.
        fan_out: Number of leaders of hosts directly below one leader.
        network: Network, such as `10.0.0.0/8`: ranks accept connections only on their addresses in it. None for the
            network over which they reach the store.

    Raises:
        ValueError: `network` is not a valid network.

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
        """Validate the network."""
        if self.network is not None:
            ipaddress.ip_network(self.network, strict=False)
