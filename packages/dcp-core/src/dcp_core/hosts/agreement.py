"""`HostAgreement`: the part of storage readers by which ranks agree on a save in stores that each host has."""

from __future__ import annotations

from typing import Any

from dcp_core.hosts.agree import agree_on_copy
from dcp_core.hosts.commit import open_host_store
from dcp_core.hosts.held_copies import AgreedCopy
from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_io import HostStore
from dcp_manifest import METADATA_NAME, CheckpointIndex, read_index

__all__ = ["HostAgreement"]


class HostAgreement(ByteStorageReader):
    """Base class of storage readers for stores of each host: each file is read on a host that has it.

    The ranks agree on one save, the newest that is complete over the hosts of the job and the folders that the id names
    beside (see `dcp_io.with_also`), before any tensor changes. What no host has is read from those.
    """

    _agreed: AgreedCopy | None = None

    def _host_store(self) -> HostStore:
        """Return the store of the checkpoint id; it reads elsewhere, as the ranks have agreed, what no host has."""
        store = self._open_host_store()
        if self._agreed is not None:
            store.read_elsewhere(self._agreed.elsewhere)
        return store

    def _open_host_store(self) -> HostStore:
        """Return the store of the checkpoint id, as before an agreement."""
        return open_host_store(self.absolute_id)

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load; a `checkpoint_id` replaces the one of the constructor."""
        self._agreed = None
        super().reset(checkpoint_id)

    def connect_ranks(self, coordinator: Any) -> None:
        """Agree on the save that all ranks load. Ranks: every rank; collective. Errors: see `agree_on_copy`."""
        self._agreed = agree_on_copy(coordinator, self._open_host_store())

    def read_index(self) -> CheckpointIndex:
        """Return the index of the save on which the ranks have agreed; without other ranks, that of this host."""
        if self._agreed is None:
            return super().read_index()
        self._reopen()
        index = read_index(self._agreed.index, file=METADATA_NAME)
        self._backend.use_index(index)
        return index

    @property
    def shares_index(self) -> bool:
        """False: all ranks have the index already."""
        return False
