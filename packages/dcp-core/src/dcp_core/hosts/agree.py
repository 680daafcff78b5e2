"""`agree_on_copy`: the ranks of a load choose the newest save of a checkpoint that is complete over all hosts."""

from __future__ import annotations

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_core.hosts.held_copies import AgreedCopy, Candidate, Held, Lack, candidates_of, complete_copy, look
from dcp_core.hosts.host_places import HostPlaces
from dcp_io import HostStore, Store
from dcp_manifest import METADATA_NAME
from dcp_ranks import Coordinator

__all__ = ["agree_on_copy"]

_TRIES = 3


def agree_on_copy(coordinator: Coordinator, store: HostStore, places: HostPlaces) -> AgreedCopy:
    """Choose the newest save that is complete over the hosts of the job and the shared folders.

    Args:
        coordinator: Coordinator of the load.
        store: This rank's folder of the checkpoint.
        places: Which ranks share a folder.

    Raises:
        CheckpointNotFoundError: No save is complete; the message says what the newest lacks.
        CorruptCheckpointError: No save is complete: of the newest, files are truncated.
        UnsafeCheckpointError, UnsupportedFormatError: All that there is are indexes that cannot be read; so, too, for
            CorruptCheckpointError.
        CheckpointException: A storage failed; raised on all ranks.

    Ranks: every rank; collective.
    """
    before: list[Candidate] = []
    lack: Lack | DcpError | None = None
    for _ in range(_TRIES):
        candidates, found = _choose(coordinator, store, places)
        if isinstance(found, AgreedCopy):
            return found
        lack = found
        if not candidates or candidates == before:  # otherwise it may have been replaced while it was looked for
            break
        before = candidates
    if isinstance(lack, DcpError):
        lack.name_place(store.url)
        raise lack
    text = (
        f"{store.url} has no complete checkpoint on the {places.count} hosts of this job: "
        f"{'no host has an index of it' if lack is None else lack.text}; load an earlier one, or start the job on "
        "the hosts that have written it"
    )
    if lack is not None and lack.truncated:
        raise CorruptCheckpointError(text, file=lack.file, key=lack.key)
    raise CheckpointNotFoundError(text)


def _choose(
    coordinator: Coordinator, store: HostStore, places: HostPlaces
) -> tuple[list[Candidate], AgreedCopy | Lack | DcpError | None]:
    """Look once; returns the saves that have an index, and the newest that is complete, or why there is none."""
    held: list[Held] = []

    def rank_candidates(found: list[Held | None]) -> tuple[list[Candidate], DcpError | None]:
        held.extend(one for one in found if one is not None)
        damage = next((one.damage for one in held if one.damage is not None), None)
        return candidates_of(found, store.also, coordinator.rank), damage

    candidates, damage = coordinator.all_reduce(
        "copies", lambda: look(store) if places.leads else None, rank_candidates
    )
    lack: Lack | None = None
    for candidate in candidates:

        def send(candidate: Candidate = candidate) -> bytes | None:
            if candidate.rank != coordinator.rank:
                return None
            source: Store = store if candidate.also is None else store.also[candidate.also]
            return source.read(METADATA_NAME)

        def check(sent: list[bytes | None], candidate: Candidate = candidate) -> AgreedCopy | Lack:
            return complete_copy(sent[candidate.rank] or b"", candidate, held, store.also)

        agreed = coordinator.all_reduce("index of a copy", send, check)
        if isinstance(agreed, AgreedCopy):
            return candidates, agreed
        lack = lack or agreed
    return candidates, lack or damage
