"""Mirror of `torch.distributed.checkpoint.storage`: re-exports only."""

from dcp_all.metadata import Metadata, MetadataIndex, StorageMeta
from dcp_all.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from dcp_core.records.protocols import StorageReader, StorageWriter, WriteResult

__all__ = [
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "SavePlan",
    "SavePlanner",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
]
