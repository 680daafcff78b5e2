"""Mirror of `torch.distributed.checkpoint.storage`: re-exports only."""

from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import StorageMeta as StorageMeta
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import SavePlanner as SavePlanner
from dcp_core.records.protocols import StorageReader as StorageReader
from dcp_core.records.protocols import StorageWriter as StorageWriter
from dcp_core.records.protocols import WriteResult as WriteResult
