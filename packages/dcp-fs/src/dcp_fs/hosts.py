"""`HostWriter` and `HostReader`: storages of checkpoints whose files lie in a folder of each host, of the same path."""

from __future__ import annotations

import os
from pathlib import Path

from dcp_core.toolkit import HostAgreement, HostCommit
from dcp_fs.reader import FileSystemReader
from dcp_fs.writer import FileSystemWriter
from dcp_io import HostFolder, StoreBackend, open_store, scheme_of
from dcp_manifest import InvalidPlaceError

__all__ = ["HostReader", "HostWriter"]


class HostWriter(HostCommit, FileSystemWriter):
    """Storage writer for checkpoint ids `host:///path`: each host's ranks write into the folder that their host has.

    Arguments: those of `FileSystemWriter`. Guarantees: those of `FileSystemWriter`, over all hosts; see
    `dcp_core.toolkit.HostCommit`.
    """

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return Path(_folder(checkpoint_id).path)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        backend = super()._open(checkpoint_id)
        backend.store = _folder(checkpoint_id)
        return backend

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a folder of each host."""
        return scheme_of(checkpoint_id) == "host"


class HostReader(HostAgreement, FileSystemReader):
    """Storage reader for checkpoint ids `host:///path`: each file is read on a host that has it.

    Arguments: those of `FileSystemReader`. On which save the ranks agree: see `dcp_core.toolkit.HostAgreement`.
    """

    def _own_path(self, checkpoint_id: str | os.PathLike[str]) -> Path:
        return Path(_folder(checkpoint_id).path)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        backend = super()._open(checkpoint_id)
        backend.store = self._host_store()
        return backend

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a folder of each host."""
        return scheme_of(checkpoint_id) == "host"


def _folder(checkpoint_id: str | os.PathLike[str]) -> HostFolder:
    store = open_store(checkpoint_id)
    if not isinstance(store, HostFolder):
        raise InvalidPlaceError(f"{os.fspath(checkpoint_id)!r} is not a folder of each host: write host:///path")
    return store
