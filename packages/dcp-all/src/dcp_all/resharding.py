"""Mirror of `torch.distributed.checkpoint.resharding`: re-exports only."""

from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_manifest.index.boxes import find_overlap as find_overlap
from dcp_manifest.index.boxes import intersect as intersect
from dcp_manifest.index.boxes import overlaps as overlaps
