"""Decide whether the ranks of a load read each stored byte once, together, or each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_base.imports import import_part
from dcp_base.logs import library_logger
from dcp_core.errors import DcpError, PluginLoadError, PluginNotFoundError
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import LoadPlan, LoadPlanner, StorageReader
from dcp_core.storage.byte_storage import collector_paused
from dcp_core.storage.storage_reader import ByteStorageReader, Exchange, PreparedRead
from dcp_ranks import Coordinator, PeerOptions
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_log = library_logger(__name__)

_ONE_RANK = "there is one rank"


@dataclass(frozen=True, slots=True)
class Offer:
    """One rank's request."""

    asked: bool | None
    obstacle: str | None
    """Why this rank cannot read together, as a clause, or None."""
    place: str = "local"
    shares_index: bool = False
    """Whether this rank can use another's index."""


class Cooperation:
    """One load's choice to read together or alone, and the common read."""

    def __init__(
        self,
        asked: bool | None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        peers: PeerOptions | None = None,
    ) -> None:
        self._asked = asked
        self._timeout_seconds = timeout_seconds
        self._peers = peers
        self._exchange: Exchange | None = None
        self.shares_index = False
        """Whether the coordinator reads the index for all ranks."""
        self.together = False
        self.reason = ""
        self.bytes_received = 0

    def offer(self, reader: StorageReader, world_size: int) -> Offer:
        """Return this rank's offer; look for dcp-exchange only if nothing else prevents it."""
        if not (self._asked is None or isinstance(self._asked, bool)):
            raise ValueError(f"cooperative={self._asked!r}: pass True, False or None")
        if self._asked is False or world_size == 1:
            return Offer(self._asked, None)
        if not isinstance(reader, ByteStorageReader):
            return Offer(self._asked, f"{type(reader).__name__} reads by itself, as in stock")
        place = reader.place
        if reader.reads_alone is not None or (self._asked is None and place == "local"):
            return Offer(self._asked, reader.reads_alone, place)
        try:
            self._exchange = import_part("exchange")
        except (PluginNotFoundError, PluginLoadError) as error:
            if self._asked:
                raise
            lack = "is not installed" if isinstance(error, PluginNotFoundError) else f"cannot be loaded ({error})"
            return Offer(None, f"dcp-exchange {lack}", place)
        return Offer(self._asked, None, place, reader.shares_index)

    def choose(self, offers: Sequence[Offer], *, speaks: bool = False) -> None:
        """Choose equally on all ranks, from offers in rank order; ValueError if `cooperative` differs.

        The rank with `speaks` warns if ranks cannot read together as requested.
        """
        self.together, self.reason = _choose(offers)
        self.shares_index = self.together and all(offer.shares_index for offer in offers)
        if speaks and self._asked and not self.together and self.reason != _ONE_RANK:
            _log.warning("cooperative=True: each rank still reads for itself: %s", self.reason)

    def share_metadata(
        self, coordinator: Coordinator, reader: StorageReader, boxes: Callable[[], Mapping[str, Any] | None] | None
    ) -> Metadata | None:
        """Return metadata from the index that the coordinator reads, if `shares_index`; None if each rank reads a part.

        Collective.
        """
        if not isinstance(reader, ByteStorageReader):
            return None
        index = coordinator.broadcast("index", lambda: None if (found := reader.read_part(boxes)).is_part else found)
        return None if index is None else reader.use_index(index)

    def read(
        self,
        coordinator: Coordinator,
        reader: StorageReader,
        finish_plan: Callable[[], LoadPlan],
        planner: LoadPlanner,
    ) -> bool:
        """Read all ranks' plans together; return whether a newer save replaced the checkpoint.

        `finish_plan` is called once, in a phase. Ranks: every rank; collective.
        """
        exchange = self._exchange
        if exchange is None or not isinstance(reader, ByteStorageReader):
            raise DcpError("the ranks did not choose to read together")

        finished: list[LoadPlan] = []

        def prepare() -> PreparedRead:
            with collector_paused():
                if not finished:
                    finished.append(finish_plan())
                return reader.prepare_read(finished[0], planner)

        done = exchange(coordinator, prepare, timeout_seconds=self._timeout_seconds, peers=self._peers)
        reader.finish_read(done.stats)
        self.bytes_received = done.stats.bytes_received
        if done.alone is not None:
            self.together, self.reason = False, done.alone
        return done.replaced


def _choose(offers: Sequence[Offer]) -> tuple[bool, str]:
    asked = offers[0].asked
    for rank, offer in enumerate(offers):
        if offer.asked is not asked:
            raise ValueError(
                f"rank 0 loads with cooperative={asked}, rank {rank} with cooperative={offer.asked}; "
                "pass the same value on all ranks"
            )
    if asked is False:
        return False, "cooperative=False"
    if len(offers) == 1:
        return False, _ONE_RANK
    for rank, offer in enumerate(offers):
        if offer.obstacle is not None:
            return False, f"rank {rank}: {offer.obstacle}"
    return (True, "cooperative=True") if asked else _choose_by_place({offer.place for offer in offers})


def _choose_by_place(places: set[str]) -> tuple[bool, str]:
    if "local" in places:
        return False, "the checkpoint is on a local disk, from which each rank reads fast"
    if "host" in places:
        return True, "each host has its own files"
    return True, "the checkpoint is in a remote storage"
