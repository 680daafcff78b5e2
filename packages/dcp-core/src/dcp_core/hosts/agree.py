"""`agree_on_copy`: the ranks of a load choose the newest save of a checkpoint that is complete over all hosts."""

from __future__ import annotations

from dcp_core.errors import CheckpointNotFoundError
from dcp_core.hosts.held_copies import AgreedCopy, Candidate, Held, candidates_of, complete_copy, look
from dcp_core.hosts.host_places import HostPlaces
from dcp_io import HostStore, Store
from dcp_manifest import METADATA_NAME
from dcp_ranks import Coordinator

__all__ = ["agree_on_copy"]


def agree_on_copy(coordinator: Coordinator, store: HostStore, places: HostPlaces) -> AgreedCopy:
    """Choose the newest save that is complete over the hosts of the job and the shared folders.

    Args:
        coordinator: Coordinator of the load.
        store: This rank's folder of the checkpoint.
        places: Which ranks share a folder.

    Raises:
        CheckpointNotFoundError: No save is complete; the message says what the newest lacks.
        CheckpointException: A storage failed; raised on all ranks.

    Ranks: every rank; collective.
    """
    held: list[Held] = []

    def rank_candidates(found: list[Held | None]) -> list[Candidate]:
        held.extend(one for one in found if one is not None)
        return candidates_of(found, store.also, coordinator.rank)

    candidates = coordinator.all_reduce("copies", lambda: look(store) if places.leads else None, rank_candidates)
    lack = "no host has an index of it"
    for candidate in candidates:

        def send(candidate: Candidate = candidate) -> bytes | None:
            if candidate.rank != coordinator.rank:
                return None
            source: Store = store if candidate.also is None else store.also[candidate.also]
            return source.read(METADATA_NAME)

        def check(sent: list[bytes | None], candidate: Candidate = candidate) -> AgreedCopy | str:
            data = sent[candidate.rank]
            return "its index has gone" if data is None else complete_copy(data, candidate, held, store.also)

        agreed = coordinator.all_reduce("index of a copy", send, check)
        if isinstance(agreed, AgreedCopy):
            return agreed
        lack = agreed
    raise CheckpointNotFoundError(
        f"{store.url} has no complete checkpoint on the {places.count} hosts of this job: {lack}; load an earlier one, "
        "or start the job on the hosts that have written it"
    )
