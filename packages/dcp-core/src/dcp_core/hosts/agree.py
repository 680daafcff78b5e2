"""The ranks of a load choose the newest save that is complete over all hosts."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_core.hosts.held_copies import AgreedCopy, Candidate, Held, Lack, candidates_of, complete_copy, look
from dcp_core.hosts.host_places import look_in_places
from dcp_io import HostStore, Store
from dcp_manifest.folders.folder import METADATA_NAME
from dcp_ranks import Coordinator

_TRIES = 3


def agree_on_copy(coordinator: Coordinator, store: HostStore) -> AgreedCopy:
    """Choose the newest save that is complete over the job's hosts and the shared directories.

    Without one: CheckpointNotFoundError, or an index's CorruptCheckpointError, UnsafeCheckpointError or
    UnsupportedFormatError.

    Ranks: every rank; collective: two phases if the coordinator has the newest save's index and the save is complete.
    """
    held: list[Held] = []

    def decide(found: list[Held | None]) -> _Found:
        held[:] = [one for one in found if one is not None]
        return _decide(held, *candidates_of(found, store.also, coordinator.rank), store, coordinator.rank)

    places, found = look_in_places(coordinator, store.parent(), lambda: look(store), decide)
    before: list[Candidate] = []
    for attempt in range(1, _TRIES + 1):
        chosen = _complete(coordinator, store, found, held)
        if isinstance(chosen, AgreedCopy):
            return chosen
        lack = chosen
        # Otherwise the save may have been replaced during the search.
        if not found.candidates or found.candidates == before or attempt == _TRIES:
            break
        before = found.candidates
        found = coordinator.all_reduce("copies", lambda: look(store) if places.leads else None, decide)
    if isinstance(lack, DcpError):
        lack.name_place(store.url)
        raise lack
    if found.failure is not None:  # there may be more files than can be read
        raise found.failure
    if found.are_bare:
        raise CheckpointNotFoundError(
            f"{store.url} cannot be loaded: {store.parent().url} is missing or empty for every rank of this job; check "
            "the path, or start the job on the hosts that have written the checkpoint"
        )
    hosts = "host" if places.count == 1 else f"{places.count} hosts"
    text = (
        f"{store.url} has no complete checkpoint on the {hosts} of this job: "
        f"{'no host has an index of it' if lack is None else lack.text}; load an earlier one, or start the job on "
        "the hosts that have written it"
    )
    if lack is not None and lack.truncated:
        raise CorruptCheckpointError(text, file=lack.file, key=lack.key)
    raise CheckpointNotFoundError(text)


@dataclass(frozen=True, slots=True)
class _Found:
    candidates: list[Candidate]
    damage: DcpError | None
    newest: AgreedCopy | Lack | None
    """None if the coordinator still needs the newest save's index."""
    are_bare: bool
    failure: OSError | None


def _decide(
    held: list[Held], candidates: list[Candidate], damage: DcpError | None, store: HostStore, rank: int
) -> _Found:
    newest = None
    if candidates and candidates[0].rank == rank:
        newest = complete_copy(_read(candidates[0], store), candidates[0], held, store.also)
    are_bare = not candidates and not store.also and all(one.is_bare for one in held)
    failure = next((one.failure for one in held if one.failure is not None), None)
    return _Found(candidates, damage, newest, are_bare, failure)


def _read(candidate: Candidate, store: HostStore) -> bytes:
    source: Store = store if candidate.also is None else store.also[candidate.also]
    return source.read(METADATA_NAME)


def _complete(
    coordinator: Coordinator, store: HostStore, found: _Found, held: list[Held]
) -> AgreedCopy | Lack | DcpError | None:
    if isinstance(found.newest, AgreedCopy):
        return found.newest
    lack = found.newest
    for candidate in found.candidates if lack is None else found.candidates[1:]:

        def send(candidate: Candidate = candidate) -> bytes | None:
            return _read(candidate, store) if candidate.rank == coordinator.rank else None

        def check(sent: list[bytes | None], candidate: Candidate = candidate) -> AgreedCopy | Lack:
            return complete_copy(sent[candidate.rank] or b"", candidate, held, store.also)

        agreed = coordinator.all_reduce("index of a copy", send, check)
        if isinstance(agreed, AgreedCopy):
            return agreed
        lack = lack or agreed
    return lack or found.damage
