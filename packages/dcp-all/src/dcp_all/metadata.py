"""Mirror of `torch.distributed.checkpoint.metadata`: re-exports only."""

from dcp_core.records.metadata import STORAGE_TYPES as STORAGE_TYPES
from dcp_core.records.metadata import BytesStorageMetadata as BytesStorageMetadata
from dcp_core.records.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_core.records.metadata import MemoryFormatEncoding
from dcp_core.records.metadata import Metadata as Metadata
from dcp_core.records.metadata import MetadataIndex as MetadataIndex
from dcp_core.records.metadata import StorageMeta as StorageMeta
from dcp_core.records.metadata import TensorProperties as TensorProperties
from dcp_core.records.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_core.records.protocols import STATE_DICT_TYPE as STATE_DICT_TYPE
from dcp_core.records.protocols import StatefulT as StatefulT

_MEM_FORMAT_ENCODING = MemoryFormatEncoding
