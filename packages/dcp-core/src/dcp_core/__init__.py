"""Distributed checkpoints: `save`, `load`, planners, and the contracts of storages, stagers and transforms.

Storages come from other packages, such as `dcp_fs`, by entry point or as arguments. Importing this package reads no
entry points, environment variables or files.
"""

from dcp_base import hookimpl
from dcp_core import plugins
from dcp_core.errors import (
    CheckpointException,
    CheckpointNotFoundError,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    CorruptCheckpointError,
    DcpError,
    MissingKeyError,
    OperationError,
    PeerLostError,
    PlanError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    UnsupportedValueError,
)
from dcp_core.estimation import Estimate, RankEstimate, estimate
from dcp_core.loading import load, load_keys, load_state_dict
from dcp_core.planning.load_planner import DefaultLoadPlanner, EmptyStateDictLoadPlanner
from dcp_core.planning.load_report import LoadMismatchError, LoadProblem, LoadReport
from dcp_core.planning.replicas import DivergentReplicaWarning
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import (
    STATE_DICT_TYPE,
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    Stateful,
    StorageReader,
    StorageWriter,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    WriteResult,
)
from dcp_core.saving import save, save_state_dict
from dcp_core.state_dict.per_rank import PerRank
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_core.tensors.staging import AsyncStager, BlockingAsyncStager
from dcp_ranks import PeerOptions

__all__ = [
    "STATE_DICT_TYPE",
    "AsyncStager",
    "BlockingAsyncStager",
    "ByteStorageReader",
    "ByteStorageWriter",
    "BytesIOWriteData",
    "BytesStorageMetadata",
    "CheckpointException",
    "CheckpointNotFoundError",
    "ChunkStorageMetadata",
    "CoordinatorLostError",
    "CoordinatorTimeoutError",
    "CorruptCheckpointError",
    "DcpError",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "DivergentReplicaWarning",
    "EmptyStateDictLoadPlanner",
    "Estimate",
    "LoadItemType",
    "LoadMismatchError",
    "LoadPlan",
    "LoadPlanner",
    "LoadProblem",
    "LoadReport",
    "Metadata",
    "MetadataIndex",
    "MissingKeyError",
    "OperationError",
    "PeerLostError",
    "PeerOptions",
    "PerRank",
    "PlanError",
    "RankEstimate",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "Stateful",
    "StorageInfo",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "UnsupportedValueError",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "estimate",
    "hookimpl",
    "load",
    "load_keys",
    "load_state_dict",
    "plugins",
    "save",
    "save_state_dict",
]
