"""Find which ranks share a directory, by random tokens that each rank publishes there."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dcp_base import InvalidPlaceError
from dcp_core.errors import CheckpointNotFoundError, DcpError
from dcp_io import STALE_AFTER_SECONDS, Store, SupportsFolders
from dcp_io.saves.save_files import temporary_of
from dcp_ranks import Coordinator

RUN_FILE = ".dcp-run"
_TOKEN = ".dcp-here-"  # noqa: S105 - the name of a file
T = TypeVar("T")
R = TypeVar("R")

# URL of a directory → run that this process found; a directory in memory may be lost during the job.
_known: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """The directories of a job's hosts."""

    leaders: tuple[int, ...]
    """Rank that manages each rank's directory; the coordinator manages its own."""
    run: str
    rank: int
    coordinator_rank: int
    are_proved: bool = True
    """Whether each rank identified its directory, which exists and is writable."""

    @property
    def coordinates(self) -> bool:
        """Whether this is the coordinator."""
        return self.rank == self.coordinator_rank

    @property
    def leads(self) -> bool:
        """Whether this rank manages its directory."""
        return self.leaders[self.rank] == self.rank

    @property
    def count(self) -> int:
        """Number of directories."""
        return len({*self.leaders})

    def claim(self, store: Store) -> None:
        """Write the run's id if necessary."""
        if not store.exists(RUN_FILE):
            store.publish(RUN_FILE, json.dumps({"run": self.run}).encode())


def find_places(
    coordinator: Coordinator, store: SupportsFolders, *, run: str | None = None, saves: bool = True
) -> HostPlaces:
    """Find which ranks share a directory and to which run it belongs; create missing directories.

    The run is the directory's, the coordinator's `run`, the last that this process found here, or random. Unless
    `saves`, a rank manages an unusable directory alone, so that a restore is possible.

    Ranks: every rank; collective, two phases.
    """
    places, _ = _find(coordinator, store, lambda: None, lambda _: None, run=run, saves=saves, makes=True)
    return places


def look_in_places(
    coordinator: Coordinator, store: SupportsFolders, look: Callable[[], T], decide: Callable[[list[T | None]], R]
) -> tuple[HostPlaces, R]:
    """Find which ranks share a directory and examine each, without creating any.

    Each managing rank calls `look`; the coordinator calls `decide` with all results (None from other ranks) for all
    ranks. A rank manages an unusable directory alone.

    Ranks: every rank; collective, two phases.
    """
    return _find(coordinator, store, look, decide, run=None, saves=False, makes=False)


def _find(
    coordinator: Coordinator,
    store: SupportsFolders,
    look: Callable[[], T],
    decide: Callable[[list[T | None]], R],
    *,
    run: str | None,
    saves: bool,
    makes: bool,
) -> tuple[HostPlaces, R]:
    own = secrets.token_hex(8)

    def leave() -> tuple[str, str | None, str, bool]:
        is_left, its_run = False, None
        with contextlib.suppress(PermissionError if saves else OSError):
            if makes or store.list() or store.folders():
                if makes:
                    store.make()
                store.publish(_TOKEN + own, b"", sync=False)  # empty files usually fit on a full disk
                is_left = True
        with contextlib.suppress(*(() if saves else (OSError,))):  # such as a keeper with a stopped process
            its_run = _read_run(store)
        return own, its_run, run or _known.get(store.url, own), is_left

    try:
        left = coordinator.all_gather("tokens", leave)
        runs = [each for _, each, _, _ in left]
        order = sorted(range(len(left)), key=lambda rank: (rank != coordinator.coordinator_rank, rank))

        def find_leader() -> tuple[int, T | None]:
            _check_runs(runs, store.url)
            seen = set[str]()
            with contextlib.suppress(*(() if saves else (OSError,))):
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidPlaceError(
            f"{store.url}/{RUN_FILE} has no id of a run: remove it if the directory is yours"
        ) from error


def _check_runs(runs: list[str | None], url: str) -> None:
    known = {run: rank for rank, run in reversed([*enumerate(runs)]) if run is not None}
    if len(known) > 1:
        places = ", ".join(f"run {run} on the host of rank {rank}" for run, rank in sorted(known.items()))
        raise InvalidPlaceError(
            f"{url} belongs to different runs ({places}): use another directory or, where it is to be taken over, "
            f"remove {RUN_FILE} there"
        )


def _remove_old(store: Store) -> None:
    with contextlib.suppress(OSError, DcpError):
        for entry in store.list():
            becomes, _ = temporary_of(entry.name) or (entry.name, "")
            is_left = becomes.startswith(_TOKEN) or (becomes == RUN_FILE and entry.name != RUN_FILE)
            if is_left and abs(time.time() - entry.mtime) > STALE_AFTER_SECONDS:
                store.delete(entry.name)
