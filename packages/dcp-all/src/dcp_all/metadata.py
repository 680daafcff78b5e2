"""Mirror of `torch.distributed.checkpoint.metadata`: re-exports only."""

from dcp_core.records.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.records.metadata import MemoryFormatEncoding as _MEM_FORMAT_ENCODING  # noqa: N814 - stock's name
from dcp_core.records.protocols import STATE_DICT_TYPE, StatefulT

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "_MEM_FORMAT_ENCODING",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StatefulT",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]
