"""Mirror of `torch.distributed.checkpoint.planner`: re-exports only."""

from dcp_all.metadata import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import StorageMeta as StorageMeta
from dcp_all.metadata import TensorProperties as TensorProperties
from dcp_core.records.protocols import BytesIOWriteData as BytesIOWriteData
from dcp_core.records.protocols import LoadItemType as LoadItemType
from dcp_core.records.protocols import LoadPlan as LoadPlan
from dcp_core.records.protocols import LoadPlanner as LoadPlanner
from dcp_core.records.protocols import ReadItem as ReadItem
from dcp_core.records.protocols import SavePlan as SavePlan
from dcp_core.records.protocols import SavePlanner as SavePlanner
from dcp_core.records.protocols import TensorWriteData as TensorWriteData
from dcp_core.records.protocols import WriteItem as WriteItem
from dcp_core.records.protocols import WriteItemType as WriteItemType
