"""Mirror of `torch.distributed.checkpoint.planner_helpers`: re-exports only."""

from dcp_core.load_plan import create_read_items_for_chunk_list

__all__ = ["create_read_items_for_chunk_list"]
