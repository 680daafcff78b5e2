"""Whether the ranks of a load read together, so that each stored byte is read once, or each rank for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_core.errors import DcpError, PluginLoadError, PluginNotFoundError
from dcp_core.logs import library_logger
from dcp_core.records.abilities import ReaderAbilities, abilities
from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import LoadPlan
from dcp_core.records.protocols import LoadPlanner, StorageReader
from dcp_core.storage.exchange import Exchange, PreparedRead
from dcp_core.storage.gc_pause import collector_paused
from dcp_core.storage_choice import PLUGIN_ERRORS
from dcp_hooks import installed
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, Coordinator, PeerOptions

__all__ = ["Cooperation", "Offer"]

_log = library_logger(__name__)

_PLUGIN = "cooperative"
_ONE_RANK = "there is one rank"


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank says before the ranks choose: what it was asked for, and what it can do."""

    asked: bool | None
    """The argument `cooperative` of the load."""
    obstacle: str | None
    """Reason why this rank cannot read together with others, as a clause; None if it can."""
    place: str = "local"
    """Where the checkpoint's files lie; see `dcp_io.Place`."""
    shares_index: bool = False
    """Whether this rank can take the index from another rank."""


class Cooperation:
    """The choice of one load between reading together and alone, and the common read.

    Args:
        asked: The argument `cooperative` of the load.
        timeout_seconds: Time without news from other ranks after which a rank gives up.
        peers: Options for connections between ranks; None for the defaults.
    """

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
        self._shares_index = False
        self.together = False
        """Whether the ranks read together."""
        self.reason = ""
        """Reason for it, as a clause."""
        self.bytes_received = 0
        """Number of bytes that other ranks have read for this rank."""

    def offer(self, reader: StorageReader, world_size: int) -> Offer:
        """Return what this rank can do; looks for a plug-in only if the other facts allow to read together.

        Raises:
            PluginNotFoundError, PluginLoadError: The load was asked to read together, and the plug-in for it is not
                installed, or broken.
            ValueError: The argument is none of the three.
        """
        if not (self._asked is None or isinstance(self._asked, bool)):
            raise ValueError(f"cooperative={self._asked!r}: pass True, False or None")
        if self._asked is False or world_size == 1:
            return Offer(self._asked, None)
        can = abilities(reader, ReaderAbilities)
        if can.prepare_read is None or can.finish_read is None:
            return Offer(self._asked, f"{type(reader).__name__} reads by itself, as in stock")
        place = can.place or "local"
        if can.reads_alone is not None or (self._asked is None and place == "local"):
            return Offer(self._asked, can.reads_alone, place)
        try:
            self._exchange = installed.factory("exchange", _PLUGIN, errors=PLUGIN_ERRORS)
        except (PluginNotFoundError, PluginLoadError) as error:
            if self._asked:
                raise
            lack = "is not installed" if isinstance(error, PluginNotFoundError) else f"cannot be loaded ({error})"
            return Offer(None, f"dcp-exchange {lack}", place)
        return Offer(self._asked, None, place, bool(can.shares_index))

    def choose(self, offers: Sequence[Offer], *, speaks: bool = False) -> None:
        """Choose, from what all ranks say; the choice is the same on all ranks.

        Args:
            offers: What the ranks say, in rank order.
            speaks: Whether this rank warns for all if they were asked to read together, and cannot.

        Raises:
            ValueError: The ranks were called with different values of `cooperative`.
        """
        self.together, self.reason = _choose(offers)
        self._shares_index = self.together and all(offer.shares_index for offer in offers)
        if speaks and self._asked and not self.together and self.reason != _ONE_RANK:
            _log.warning("cooperative=True: each rank reads for itself all the same: %s", self.reason)

    def share_metadata(self, coordinator: Coordinator, reader: StorageReader) -> Metadata | None:
        """Return the metadata of the checkpoint, from the index that the coordinator reads for all ranks.

        Returns:
            The metadata; None if each rank reads it, since the ranks do not read together, or their readers cannot.

        Raises:
            CheckpointException: The coordinator could not read the index; raised on all ranks.

        Ranks: every rank; collective if the ranks read together.
        """
        can = abilities(reader, ReaderAbilities)
        if not self._shares_index or can.read_index is None or can.use_index is None:
            return None
        return can.use_index(coordinator.broadcast("index", can.read_index))

    def read(
        self,
        coordinator: Coordinator,
        reader: StorageReader,
        finish_plan: Callable[[], LoadPlan],
        planner: LoadPlanner,
    ) -> bool:
        """Read the plans of all ranks together.

        Args:
            coordinator: Coordinator of the load.
            reader: Storage reader of this rank.
            finish_plan: Function that returns this rank's plan; called once, within a phase.
            planner: Load planner of this rank.

        Returns:
            Whether a newer save has replaced the checkpoint meanwhile, so that the load must be planned again.

        Ranks: every rank; collective.
        """
        can = abilities(reader, ReaderAbilities)
        exchange, prepare_read, finish_read = self._exchange, can.prepare_read, can.finish_read
        if exchange is None or prepare_read is None or finish_read is None:
            raise DcpError("the ranks did not choose to read together")

        finished: list[LoadPlan] = []

        def prepare() -> PreparedRead:
            with collector_paused():
                if not finished:
                    finished.append(finish_plan())
                made: PreparedRead = prepare_read(finished[0], planner)
            return made

        done = exchange(coordinator, prepare, timeout_seconds=self._timeout_seconds, peers=self._peers)
        finish_read(done.stats)
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
        return True, "each host has files of its own"
    return True, "the checkpoint is in a remote storage"
