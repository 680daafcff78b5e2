"""Roster of ranks in the store: a card (process identity and addresses) of each rank, and the tree of all ranks.

Keys under `dcp/peers/<sequence>/`, which stay as long as the store: `token` (the secret of the job), `root` (the
coordinator's card), `host/<host>` (number of cards of a host), `hosts` (number of hosts), `host/<host>/<n>` (the cards
of a host's ranks), `hosts/<n>` (the cards of the leaders). Not in this module: connections.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Container
from dataclasses import dataclass

from dcp_ranks.peers.process_identity import ProcessIdentity
from dcp_ranks.transport.chunked_store import StoreWire
from dcp_ranks.transport.handshake import new_challenge
from dcp_ranks.transport.pickled import decode, encode

__all__ = ["Card", "CardBox"]


@dataclass(frozen=True, slots=True)
class Card:
    """Record of one rank in the store: process identity, and the addresses on which the rank accepts connections."""

    rank: int
    process: ProcessIdentity
    addresses: tuple[str, ...] = ()
    port: int = 0
    challenge: bytes = b""
    """Random bytes that a connecting rank must authenticate with the secret of the job; see `handshake`."""


class CardBox:
    """Reader and writer of the cards (process identity and addresses) of a group's ranks in the store.

    In a tree with leaders, a rank is below the leader of its host, and a leader is below another leader or the
    coordinator, each of which has at most `fan_out` leaders directly below. Without leaders, all ranks are directly
    below the coordinator.

    Args:
        wire: Access to the store's keys under the prefix of the cards.
        process: Identity of this rank's process.
        fan_out: Largest number of leaders directly below one leader; None for a tree without leaders.
    """

    def __init__(self, wire: StoreWire, process: ProcessIdentity, fan_out: int | None) -> None:
        self._process = process
        self._fan_out = fan_out
        self._host = f"host/{hashlib.sha256(process.host.encode()).hexdigest()[:16]}"
        self._leader_number: int | None = None
        self.secret = wire.claim("token", secrets.token_hex(32)).encode()
        """Secret of the job; it is never sent over a connection."""
        self.challenge = new_challenge()
        """Challenge of this rank for ranks that connect to it; see `handshake`."""

    def leave(
        self, wire: StoreWire, rank: int, *, leads: bool, open_door: Callable[[], tuple[tuple[str, ...], int]]
    ) -> None:
        """Write this rank's card to the store; does not wait for other ranks.

        Args:
            wire: Access to the store's keys under the prefix of the cards.
            rank: Rank of this process within the group.
            leads: Whether this rank is the coordinator, the top of the tree.
            open_door: Function that opens listening sockets and returns their addresses and port; called only if other
                ranks are to connect to this rank.
        """
        number = wire.add(self._host)
        first = self._fan_out is not None and number == 1
        card = Card(rank, self._process, *(open_door() if leads or first else ((), 0)), self.challenge)
        if leads:
            wire.put("root", encode(card))
        if first:
            self._leader_number = wire.add("hosts")
            wire.put(f"hosts/{self._leader_number}", encode(card))
        wire.put(f"{self._host}/{number}", encode(card))

    def of_host(self, wire: StoreWire, known: Container[int] = ()) -> dict[int, Card]:
        """Return the cards of this host's ranks that are in the store so far, including this rank's card.

        Args:
            wire: Access to the store's keys under the prefix of the cards.
            known: Numbers of the cards that are not wanted again: ranks ask from time to time.

        Returns:
            Number of the card → card.
        """
        numbers = [number for number in range(1, wire.count(self._host) + 1) if number not in known]
        keys = {number: f"{self._host}/{number}" for number in numbers}
        return {number: _read(wire, key) for number, key in keys.items() if wire.has(key)}

    def above(self, wire: StoreWire) -> Card:
        """Return the card of the rank directly above this rank in the tree. Not for the coordinator."""
        if self._fan_out is None:
            return _read(wire, "root")
        if self._leader_number is None:
            return _read(wire, f"{self._host}/1")
        above = 0 if self._leader_number <= self._fan_out else (self._leader_number - 1) // self._fan_out
        return _read(wire, f"hosts/{above}" if above else "root")


def _read(wire: StoreWire, key: str) -> Card:
    data, _ = wire.get(key)
    card: Card = decode(data)
    return card
