"""Mirror of `torch.distributed.checkpoint.resharding`: re-exports only."""

from dcp_all.metadata import ChunkStorageMetadata
from dcp_manifest.index.boxes import find_overlap, intersect, overlaps

__all__ = [
    "ChunkStorageMetadata",
    "find_overlap",
    "intersect",
    "overlaps",
]
