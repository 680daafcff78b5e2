"""Mirror of `torch.distributed.checkpoint.protocol`, of torch 2.15 and newer: re-exports only."""

from dcp_all.metadata import ChunkStorageMetadata as ChunkStorageMetadata
from dcp_all.metadata import MetadataIndex as MetadataIndex
from dcp_core.shards.boxes import CheckpointableTensor as CheckpointableTensor
