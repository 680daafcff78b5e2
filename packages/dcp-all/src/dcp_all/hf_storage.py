"""Mirror of `torch.distributed.checkpoint.hf_storage`: re-exports only."""

from dcp_all._consolidate_hf_safetensors import consolidate_safetensors_files
from dcp_all.filesystem import FileSystemReader, FileSystemWriter, SerializationFormat
from dcp_all.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_all.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from dcp_all.storage import WriteResult
from dcp_format.hugging_face.hf_reader import HuggingFaceStorageReader
from dcp_format.hugging_face.hf_writer import HuggingFaceStorageWriter

__all__ = [
    "ChunkStorageMetadata",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MetadataIndex",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "SerializationFormat",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "WriteItem",
    "WriteResult",
    "consolidate_safetensors_files",
]
