"""Holders: which hosts have which objects, if each host has its own (a `dcp_io.HostStore`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_io import HostStore
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError

Holders = Mapping[str, tuple[int, ...]]
"""Name of an object → numbers of the hosts that have it."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A copy of an object that could not be read."""

    name: str
    host: int
    error: str


def pack_held(store: HostStore, names: Sequence[str]) -> bytes:
    """Return one bit per name: whether this host's store has the object."""
    held = store.holding(names)
    return np.packbits(np.array([name in held for name in names], bool)).tobytes()


def by_what_they_hold(hosts: Sequence[Sequence[int]], packed: Sequence[bytes | None]) -> tuple[tuple[int, ...], ...]:
    """Split hosts with ranks that see different objects, such as two containers of one machine.

    Return groups of ascending ranks, in the order of their lowest ranks.
    """
    found: dict[tuple[int, bytes | None], list[int]] = {}
    for number, members in enumerate(hosts):
        for rank in members:
            found.setdefault((number, packed[rank]), []).append(rank)
    return tuple(sorted(map(tuple, found.values())))


def unpack_holders(
    names: Sequence[str],
    packed: Sequence[bytes | None],
    hosts: Sequence[Sequence[int]],
    bad: Mapping[tuple[str, int], str],
) -> Holders:
    """Return the holders per object, from results of `pack_held` per rank.

    `bad` maps object and lowest rank of a host with an unreadable copy to the error. Raises CheckpointNotFoundError if
    no host has an object, CorruptCheckpointError if no copy can be read.
    """
    found: dict[str, list[int]] = {name: [] for name in names}
    for number, members in enumerate(hosts):
        said = [bits for rank in members if (bits := packed[rank]) is not None]
        held = np.zeros(len(names), bool)
        for bits in said:
            held |= np.unpackbits(np.frombuffer(bits, np.uint8), count=len(names)).astype(bool)
        for place in np.flatnonzero(held).tolist():
            if (names[place], members[0]) not in bad:
                found[names[place]].append(number)
    for name, holding in found.items():
        if not holding:
            raise _lack(name, len(hosts), {rank: text for (of, rank), text in bad.items() if of == name})
    return {name: tuple(holding) for name, holding in found.items()}


def _lack(name: str, hosts: int, bad: Mapping[int, str]) -> Exception:
    remedy = "load an earlier checkpoint, or start the job on the hosts that have written this one"
    if not bad:
        return CheckpointNotFoundError(f"no host of this job has {name} (hosts: {hosts}): {remedy}")
    copies = "; ".join(f"rank {rank}'s: {text}" for rank, text in bad.items())
    return CorruptCheckpointError(
        f"no copy can be read on the hosts of this job ({hosts}; {copies}): {remedy}", file=name
    )


def name_in(error: BaseException, names: Iterable[str]) -> str | None:
    """Return the object that a read error is about, or None."""
    file = getattr(error, "file", None)
    text = str(error)
    candidates = [name for name in names if name == file or name in text]
    return max(candidates, key=lambda name: (name == file, len(name)), default=None)
