"""Mirror of `torch.distributed.checkpoint.api`: re-exports only."""

from dcp_core.errors import CheckpointException as CheckpointException
