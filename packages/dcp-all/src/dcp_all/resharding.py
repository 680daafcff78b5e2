"""Mirror of `torch.distributed.checkpoint.resharding`: re-exports only."""

from dcp_core.boxes import find_overlap, intersect, overlaps

__all__ = ["find_overlap", "intersect", "overlaps"]
