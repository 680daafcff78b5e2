"""Mirror of `torch.distributed.checkpoint.storage`: re-exports only."""

from dcp_core.protocols import StorageReader, StorageWriter, WriteResult

__all__ = ["StorageReader", "StorageWriter", "WriteResult"]
