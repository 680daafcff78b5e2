"""`PeerOptions`: deadlines, leaders and network of ranks that watch and call each other."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

_LONGEST_SECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options for how ranks watch each other and connect to each other; the same on all ranks.

    Attributes:
        peer_timeout_seconds: Seconds within which ranks raise if a host does not answer; at least 2.
        leaders_above: Largest world size in which every rank communicates directly with the coordinator. In larger
            groups, one leader per host does so for its ranks.
        fan_out: Largest number of leaders directly below one leader or the coordinator.
        network: IP network, such as `10.0.0.0/8`, in which ranks accept connections from each other. None for the
            network through which the ranks reach the store.
        ports: First and last TCP port for these connections, such as `(29500, 29599)`: at least two for each rank of a
            host. None for any free ports.

    Raises:
        ValueError: A number is not above 0, `network` is invalid, or `ports` are not ascending.

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
    ports: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        seconds = self.peer_timeout_seconds
        if not 0 < seconds <= _LONGEST_SECONDS:  # NaN, too; TCP_USER_TIMEOUT is in ms, of 31 bits
            raise ValueError(
                f"peer_timeout_seconds={seconds!r}: pass seconds, more than 0 and at most {_LONGEST_SECONDS:,}"
            )
        for name, count, least in (("leaders_above", self.leaders_above, 0), ("fan_out", self.fan_out, 1)):
            if count < least:
                raise ValueError(f"{name}={count!r}: pass a number of at least {least}")
        if self.network is not None:
            ipaddress.ip_network(self.network, strict=False)
        if self.ports is not None and not (len(self.ports) == 2 and 1 <= self.ports[0] <= self.ports[1] < 1 << 16):
            raise ValueError(
                f"ports={self.ports!r}: pass the first and the last TCP port, from 1 to 65535, such as (29500, 29599)"
            )


DEFAULT_PEERS = PeerOptions()
