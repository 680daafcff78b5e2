"""Manifest of a checkpoint (its index as columns): reading, writing, verification; search for checkpoints. No torch."""

from __future__ import annotations

from dcp_manifest.descriptors import open_descriptor
from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    InvalidIndexError,
    InvalidPlaceError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.index_problems import Problem, verify
from dcp_manifest.file.manifest import decode, encode, read_index
from dcp_manifest.file.manifest_file import ManifestFile
from dcp_manifest.folders.checkpoint_order import step_of
from dcp_manifest.folders.file_names import (
    DATA_SUFFIX,
    METADATA_NAME,
    SAVE_MARKER_PREFIX,
    is_index_name,
    rank_of_data_file,
)
from dcp_manifest.folders.find_checkpoints import (
    FoundCheckpoint,
    checkpoints_below,
    file_sizes,
    first_valid,
    index_of,
    needed_bytes,
    noted_step_of,
)
from dcp_manifest.folders.folder import LocalFolder
from dcp_manifest.folders.folder_notes import NOTE, QUARANTINE, put_aside_reason, quarantine_reason
from dcp_manifest.folders.index_choice import choose_index
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, ManifestInfo, PathElement, TensorFlags
from dcp_manifest.index.consistency import check_index
from dcp_manifest.index.coverage import coverage_problems
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES
from dcp_manifest.index.items import Framing, ItemKind, StoredItem, block_bytes, border_count, border_counts
from dcp_manifest.index.literal_keys import LiteralKey
from dcp_manifest.index.merge_indexes import merge_rank_indexes
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.index.stored_tensors import (
    StoredChunk,
    StoredTensor,
    TensorForm,
    stored_objects,
    stored_tensors,
    tensor_columns,
)
from dcp_manifest.logs import library_logger
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError
from dcp_manifest.printable import printable, printable_bytes
from dcp_manifest.schemes import file_path, scheme_of, without_end_slash
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import is_stock_readable, stock_head
from dcp_manifest.stock.stub import stub_head

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
    "DcpError",
    "ForbiddenGlobalError",
    "FoundCheckpoint",
    "Framing",
    "InvalidIndexError",
    "InvalidPlaceError",
    "ItemColumns",
    "ItemKind",
    "LiteralKey",
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
    "border_count",
    "border_counts",
    "check_index",
    "checkpoints_below",
    "choose_index",
    "coverage_problems",
    "decode",
    "encode",
    "file_path",
    "file_sizes",
    "first_valid",
    "index_of",
    "is_index_name",
    "is_stock_readable",
    "library_logger",
    "merge_rank_indexes",
    "needed_bytes",
    "noted_step_of",
    "open_descriptor",
    "printable",
    "printable_bytes",
    "put_aside_reason",
    "quarantine_reason",
    "rank_of_data_file",
    "read_index",
    "read_stock",
    "scheme_of",
    "step_of",
    "stock_head",
    "stored_objects",
    "stored_tensors",
    "stub_head",
    "tensor_columns",
    "verify",
    "without_end_slash",
]
