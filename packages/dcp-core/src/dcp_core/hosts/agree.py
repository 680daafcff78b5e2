"""`agree_on_copy`: the ranks of a load choose the newest save of a checkpoint that is complete over all hosts."""

from __future__ import annotations

from dataclasses import dataclass

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_core.hosts.held_copies import AgreedCopy, Candidate, Held, Lack, candidates_of, complete_copy, look
from dcp_core.hosts.host_places import look_in_places
from dcp_io import HostStore, Store
from dcp_manifest import METADATA_NAME
from dcp_ranks import Coordinator

__all__ = ["agree_on_copy"]

_TRIES = 3


def agree_on_copy(coordinator: Coordinator, store: HostStore) -> AgreedCopy:
    """Choose the newest save that is complete over the hosts of the job and the shared folders.

    Args:
        coordinator: Coordinator of the load.
        store: This rank's folder of the checkpoint.

    Raises:
        CheckpointNotFoundError: No save is complete; the message says what the newest lacks.
        CorruptCheckpointError: No save is complete: of the newest, files are truncated.
        UnsafeCheckpointError, UnsupportedFormatError: All that there is are indexes that cannot be read; so, too, for
            CorruptCheckpointError.
        CheckpointException: A storage failed; raised on all ranks.

    Ranks: every rank; collective, two phases if the coordinator has the index of the newest save, and it is complete.
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
        # Otherwise it may have been replaced while it was looked for.
        if not found.candidates or found.candidates == before or attempt == _TRIES:
            break
        before = found.candidates
        found = coordinator.all_reduce("copies", lambda: look(store) if places.leads else None, decide)
    if isinstance(lack, DcpError):
        lack.name_place(store.url)
        raise lack
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
    """What the coordinator has made of what the places have."""

    candidates: list[Candidate]
    """The saves that have an index, the newest first."""
    damage: DcpError | None
    """What is wrong with an index."""
    newest: AgreedCopy | Lack | None
    """The newest save, or what it lacks; None if the coordinator must be sent its index first."""
    are_bare: bool
    """Whether no place has anything at all."""


def _decide(
    held: list[Held], candidates: list[Candidate], damage: DcpError | None, store: HostStore, rank: int
) -> _Found:
    """On the coordinator: look at the newest save at once, if its index can be read here."""
    newest = None
    if candidates and candidates[0].rank == rank:
        newest = complete_copy(_read(candidates[0], store), candidates[0], held, store.also)
    return _Found(candidates, damage, newest, not candidates and not store.also and all(one.is_bare for one in held))


def _read(candidate: Candidate, store: HostStore) -> bytes:
    """Return the index of a save, on the rank that has it."""
    source: Store = store if candidate.also is None else store.also[candidate.also]
    return source.read(METADATA_NAME)


def _complete(
    coordinator: Coordinator, store: HostStore, found: _Found, held: list[Held]
) -> AgreedCopy | Lack | DcpError | None:
    """Return the newest save that is complete, or why there is none. Ranks: every rank; collective.

    Args:
        coordinator: Coordinator of the load.
        store: This rank's folder of the checkpoint.
        found: What was found.
        held: On the coordinator, what each place has.
    """
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
