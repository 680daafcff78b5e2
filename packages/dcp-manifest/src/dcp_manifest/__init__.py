"""Manifest of a checkpoint (its index as columns): reading, writing, verification; search for checkpoints. No torch."""

from __future__ import annotations

from dcp_manifest.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
    UnsupportedFormatError,
)
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.folders.find_checkpoints import FoundCheckpoint, checkpoints_below, index_of
from dcp_manifest.folders.folder import LocalFolder
from dcp_manifest.index.columns import CheckpointIndex, StoredItem
from dcp_manifest.index.stored_tensors import StoredChunk, StoredTensor, stored_tensors

__all__ = [
    "CheckpointIndex",
    "CheckpointNotFoundError",
    "CorruptCheckpointError",
    "FoundCheckpoint",
    "LocalFolder",
    "StoredChunk",
    "StoredItem",
    "StoredTensor",
    "UnsafeCheckpointError",
    "UnsupportedFormatError",
    "checkpoints_below",
    "index_of",
    "read_index",
    "stored_tensors",
]
