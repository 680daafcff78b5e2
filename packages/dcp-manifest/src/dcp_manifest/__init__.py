"""Manifest of a checkpoint (its index as columns): reading, writing, verification; search for checkpoints. No torch."""

from __future__ import annotations

from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.index_problems import Problem
from dcp_manifest.file.manifest_file import ManifestFile
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.find_checkpoints import (
    FoundCheckpoint,
    check_files,
    checkpoints_below,
    file_sizes,
    index_of,
)
from dcp_manifest.folders.folder import (
    DATA_SUFFIX,
    METADATA_NAME,
    NOTE,
    QUARANTINE,
    SAVE_MARKER_PREFIX,
    LocalFolder,
    is_index_name,
    parse_quarantine,
    put_aside_reason,
    rank_of_data_file,
)
from dcp_manifest.index.boxes import coverage_problems
from dcp_manifest.index.columns import (
    CheckpointIndex,
    Framing,
    ItemKind,
    ManifestInfo,
    PathElement,
    StoredItem,
    TensorFlags,
    block_bytes,
    needed_bytes,
)
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES
from dcp_manifest.index.schema import check_index
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.index.stored_tensors import (
    StoredChunk,
    StoredTensor,
    TensorForm,
    stored_objects,
    stored_tensors,
    tensor_columns,
)
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError

__all__ = [
    "DATA_SUFFIX",
    "ITEM_BYTES",
    "METADATA_NAME",
    "NOTE",
    "QUARANTINE",
    "SAVE_MARKER_PREFIX",
    "TYPED_STORAGES",
    "CheckpointIndex",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "ForbiddenGlobalError",
    "FoundCheckpoint",
    "Framing",
    "ItemKind",
    "LocalFolder",
    "ManifestFile",
    "ManifestInfo",
    "PathElement",
    "Problem",
    "StoredChunk",
    "StoredItem",
    "StoredItems",
    "StoredTensor",
    "TensorFlags",
    "TensorForm",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "block_bytes",
    "check_files",
    "check_index",
    "checkpoints_below",
    "coverage_problems",
    "encode",
    "file_sizes",
    "index_of",
    "is_index_name",
    "needed_bytes",
    "parse_quarantine",
    "put_aside_reason",
    "rank_of_data_file",
    "read_index",
    "stored_objects",
    "stored_tensors",
    "tensor_columns",
]
