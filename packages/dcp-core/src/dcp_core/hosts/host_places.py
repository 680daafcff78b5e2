"""`HostPlaces`: which ranks of a job share a folder, where each host has a folder of its own under the same path.

Proved by tokens: each rank leaves a random one in its folder, and those who find it there share the folder.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcp_core.errors import CheckpointNotFoundError, DcpError
from dcp_io import Store, temporary_of
from dcp_manifest import InvalidPlaceError
from dcp_ranks import Coordinator

__all__ = ["RUN_FILE", "HostPlaces", "find_places", "look_in_places"]

RUN_FILE = ".dcp-run"
"""Name of the file in each place of a run that has the run's id."""
_TOKEN = ".dcp-here-"  # noqa: S105 - the name of a file
_OLD_SECONDS = 3600.0
T = TypeVar("T")
R = TypeVar("R")

# URL of a folder → run, as this process has found it: memory may be lost while the job goes on.
_known: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """The places of a job: the folders, of one path, that its hosts have."""

    leaders: tuple[int, ...]
    """For each rank, the rank that looks after its place; the coordinator looks after its own."""
    run: str
    """Id of the run to which the places belong."""
    rank: int
    """This rank."""
    coordinator_rank: int
    """The rank that coordinates."""
    are_proved: bool = True
    """Whether every rank could prove which folder it has: False if one of them took no file, or was missing."""

    @property
    def coordinates(self) -> bool:
        """Whether this rank is the coordinator."""
        return self.rank == self.coordinator_rank

    @property
    def leads(self) -> bool:
        """Whether this rank looks after its place."""
        return self.leaders[self.rank] == self.rank

    @property
    def count(self) -> int:
        """Number of places."""
        return len({*self.leaders})

    def claim(self, store: Store) -> None:
        """Write the run's id into this rank's place, if it has none."""
        if not store.exists(RUN_FILE):
            store.publish(RUN_FILE, json.dumps({"run": self.run}).encode())


def find_places(coordinator: Coordinator, store: Store, *, run: str | None = None, saves: bool = True) -> HostPlaces:
    """Find out which ranks share a folder, and to which run their folders belong; makes folders that are missing.

    Args:
        coordinator: Coordinator of the ranks.
        store: The folder, of the same path on all ranks.
        run: Id of the run, if no folder has one; the coordinator's counts. None for the one that these folders had when
            this process last looked, or else a random one.
        saves: Whether a folder that takes no file is an error. Otherwise its rank looks after it alone, so that a full
            disk, or one that may only be read, prevents no restore.

    Raises:
        CheckpointException: Folders belong to different runs (`InvalidPlaceError`), or a storage failed; raised on all
            ranks.

    Ranks: every rank; collective, two phases.
    """
    places, _ = _find(coordinator, store, lambda: None, lambda _: None, run=run, saves=saves, makes=True)
    return places


def look_in_places(
    coordinator: Coordinator, store: Store, look: Callable[[], T], decide: Callable[[list[T | None]], R]
) -> tuple[HostPlaces, R]:
    """Find out which ranks share a folder, and what is in each: in no more phases than `find_places`; makes no folder.

    A rank whose folder is missing, or takes no file, looks after that alone.

    Args:
        coordinator: Coordinator of the ranks.
        store: The folder, of the same path on all ranks.
        look: Function that returns what is in a place; called on the rank that looks after it.
        decide: Function of what all ranks have found, None from those that look after no place; called on the
            coordinator.

    Returns:
        The places, and on all ranks what `decide` has returned.

    Raises:
        CheckpointException: As for `find_places`, or `look` or `decide` failed.

    Ranks: every rank; collective, two phases.
    """
    return _find(coordinator, store, look, decide, run=None, saves=False, makes=False)


def _find(
    coordinator: Coordinator,
    store: Store,
    look: Callable[[], T],
    decide: Callable[[list[T | None]], R],
    *,
    run: str | None,
    saves: bool,
    makes: bool,
) -> tuple[HostPlaces, R]:
    own = secrets.token_hex(8)

    def leave() -> tuple[str, str | None, str, bool]:
        is_left = False
        if makes or store.list() or store.folders():
            with contextlib.suppress(PermissionError if saves else OSError):
                if makes:
                    store.make()
                store.publish(_TOKEN + own, b"", sync=False)  # empty: a full disk takes that, mostly
                is_left = True
        return own, _read_run(store), run or _known.get(store.url, own), is_left

    try:
        left = coordinator.all_gather("tokens", leave)
        runs = [each for _, each, _, _ in left]
        order = sorted(range(len(left)), key=lambda rank: (rank != coordinator.coordinator_rank, rank))

        def find_leader() -> tuple[int, T | None]:
            _check_runs(runs, store.url)
            seen = {entry.name for entry in store.list()}
            leader = next((rank for rank in order if _TOKEN + left[rank][0] in seen), coordinator.rank)
            return leader, look() if leader == coordinator.rank else None

        def conclude(found: list[tuple[int, T | None]]) -> tuple[tuple[int, ...], R]:
            return tuple(leader for leader, _ in found), decide([each for _, each in found])

        leaders, decided = coordinator.all_reduce("places", find_leader, conclude)
    finally:
        with contextlib.suppress(OSError, DcpError):
            store.delete(_TOKEN + own)
    first = coordinator.coordinator_rank
    _known[store.url] = found = next((each for each in runs if each), left[first][2])
    places = HostPlaces(leaders, found, coordinator.rank, first, all(is_left for *_, is_left in left))
    if places.leads:
        _remove_old(store)
    return places, decided


def _read_run(store: Store) -> str | None:
    try:
        return str(json.loads(store.read(RUN_FILE))["run"])
    except CheckpointNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidPlaceError(
            f"{store.url}/{RUN_FILE} has no id of a run: remove it if the folder is yours"
        ) from error


def _check_runs(runs: list[str | None], url: str) -> None:
    known = {run: rank for rank, run in reversed([*enumerate(runs)]) if run is not None}
    if len(known) > 1:
        places = ", ".join(f"run {run} on the host of rank {rank}" for run, rank in sorted(known.items()))
        raise InvalidPlaceError(
            f"{url} belongs to different runs ({places}): use another folder or, where it is to be taken over, remove "
            f"{RUN_FILE} there"
        )


def _remove_old(store: Store) -> None:
    """Remove tokens that killed processes have left, and what they had begun to publish."""
    with contextlib.suppress(OSError, DcpError):
        for entry in store.list():
            becomes, _ = temporary_of(entry.name) or (entry.name, "")
            is_left = becomes.startswith(_TOKEN) or (becomes == RUN_FILE and entry.name != RUN_FILE)
            if is_left and abs(time.time() - entry.mtime) > _OLD_SECONDS:
                store.delete(entry.name)
