"""Agreement of a group's ranks on an id of this start of the job, in a store that may hold keys of an earlier start.

torchrun's agent keeps one store while it restarts the ranks, so ranks that are restarted find what the killed ones
left there: counters of operations, and cards of processes that have ended. Every other key of this package is
therefore below the id. A count of restarts could not serve as one: each host's agent counts its own.

Keys under `dcp/start/`: `hello/<rank>` (what a rank of this start drew at random), `offer` (the coordinator's id, with
what it has read from every rank), `taken/<rank>` (the id that a rank takes, since the offer holds what it drew
itself), `agreed/<id>` (all ranks have taken it). A rank's newer value replaces that of an earlier start, and no rank
takes an offer of an earlier one. Not in this module: what is below the id.
"""

from __future__ import annotations

import json
import os
import time
import uuid

from dcp_ranks.errors import ERROR_TYPES, ErrorTypes
from dcp_ranks.transport.chunked_store import KeyValueStore, StoreWire

__all__ = ["StartAgreement", "store_may_be_older"]

_PHASE = "agree on this start of the job"


def store_may_be_older() -> bool:
    """Return whether this process's launcher, such as torchrun, serves the store, and so may have started ranks before.

    Ranks: the same on every rank of a job.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class StartAgreement:
    """One rank's part in the agreement. Its ranks may call `reach` again after an error or interrupt.

    Args:
        rank: Rank of this process within the group.
        world_size: Number of ranks in the group.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._drawn = uuid.uuid4().hex
        self._offered: list[str] = []
        self._id = ""

    def reach(self, store: KeyValueStore, timeout_seconds: float, errors: ErrorTypes = ERROR_TYPES) -> str:
        """Return the id, the same on all ranks and new at each start of the job.

        Args:
            store: Connection to the group's store.
            timeout_seconds: Time in seconds to wait for the other ranks.
            errors: Exception classes to raise.

        Raises:
            CoordinatorTimeoutError: A rank did not arrive in time.
            CoordinatorLostError: The store does not answer.

        Ranks: collective.
        """
        wire = StoreWire(store, "dcp/start/", self._world_size, errors=errors)
        started = time.monotonic()
        wire.put(f"hello/{self._rank}", self._drawn.encode())
        step = self._lead if self._rank == 0 else self._follow
        if not wire.wait(lambda: step(wire), started + timeout_seconds):
            missing = self._missing(wire)
            raise errors.coordinator_timeout(_PHASE, missing, time.monotonic() - started)
        return self._id

    def _lead(self, wire: StoreWire) -> bool:
        """Offer an id to those who are there by now; return whether all have taken it."""
        keys = [f"hello/{rank}" for rank in range(self._world_size)]
        if not wire.has(*keys):
            return False
        hellos = [wire.get(key)[0].decode() for key in keys]
        if hellos != self._offered:
            self._id, self._offered = uuid.uuid4().hex, hellos
            wire.put("offer", json.dumps([self._id, hellos]).encode())
        if any(self._taken(wire, rank) != self._id for rank in range(1, self._world_size)):
            return False
        wire.mark(f"agreed/{self._id}")
        return True

    def _follow(self, wire: StoreWire) -> bool:
        """Take an offer that knows this rank; return whether all have taken the same."""
        if not wire.has("offer"):
            return False
        offered, drawn = json.loads(wire.get("offer")[0])
        if len(drawn) != self._world_size or drawn[self._rank] != self._drawn:
            return False
        if offered != self._id:
            wire.put(f"taken/{self._rank}", offered.encode())
            self._id = offered
        return wire.has(f"agreed/{offered}")

    def _taken(self, wire: StoreWire, rank: int) -> str:
        return wire.get(f"taken/{rank}")[0].decode() if wire.has(f"taken/{rank}") else ""

    def _missing(self, wire: StoreWire) -> list[int]:
        """Return the ranks that hold up this one, as far as it can know: what an earlier start left looks alike."""
        everybody = range(self._world_size)
        if self._rank == 0 and self._id:
            return [rank for rank in everybody if rank and self._taken(wire, rank) != self._id]
        return [rank for rank in everybody if not wire.has(f"hello/{rank}")] or [0]
