"""Mirror of `torch.distributed.checkpoint.logging_handlers`: re-exports only."""

from dcp_core.events import LOGGER_NAME as DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME"]
