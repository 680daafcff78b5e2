"""Mirror of `torch.distributed.checkpoint.hf_storage`: re-exports only."""

from dcp_all._consolidate_hf_safetensors import consolidate_safetensors_files as consolidate_safetensors_files
from dcp_all.filesystem import FileSystemReader as FileSystemReader
from dcp_all.filesystem import FileSystemWriter as FileSystemWriter
from dcp_all.filesystem import SerializationFormat as SerializationFormat
from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import Metadata as Metadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_all.metadata import StorageMeta as StorageMeta
from dcp_all.metadata import TensorProperties as TensorProperties
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadPlan as LoadPlan
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner import ReadItem as ReadItem
from dcp_all.planner import SavePlan as SavePlan
from dcp_all.planner import SavePlanner as SavePlanner
from dcp_all.planner import WriteItem as WriteItem
from dcp_all.storage import WriteResult as WriteResult
from dcp_format.hugging_face.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
from dcp_format.hugging_face.hf_writer import HuggingFaceStorageWriter as HuggingFaceStorageWriter
