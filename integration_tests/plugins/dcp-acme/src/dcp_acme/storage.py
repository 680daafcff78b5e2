"""`VaultWriter` and `VaultReader`: the byte storage of `dcp_core`, in the vault."""

from __future__ import annotations

import os

from dcp_acme.deflate import BlockDeflate
from dcp_acme.vault import is_address, open_store
from dcp_core import ByteStorageReader, ByteStorageWriter
from dcp_io import StoreBackend

__all__ = ["VaultReader", "VaultWriter"]


class VaultWriter(ByteStorageWriter):
    """Saves into the vault; the old checkpoint stays until the new one is published.

    Args:
        checkpoint_id: `acme://team/run`.
        deflate: Compress tensors with this package's transform.
    """

    def __init__(
        self, checkpoint_id: str | os.PathLike[str], *, deflate: bool = False
    ) -> None:
        super().__init__(checkpoint_id, compression=BlockDeflate() if deflate else None)

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        return StoreBackend(open_store(checkpoint_id), threads=2)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id has this storage's scheme."""
        return is_address(checkpoint_id)


class VaultReader(ByteStorageReader):
    """Loads from the vault, checking every byte that a value depends on."""

    def _open(self, checkpoint_id: str | os.PathLike[str]) -> StoreBackend:
        return StoreBackend(open_store(checkpoint_id), threads=2)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the id has this storage's scheme."""
        return is_address(checkpoint_id)
