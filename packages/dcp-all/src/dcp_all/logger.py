"""Mirror of `torch.distributed.checkpoint.logger`: re-exports only."""

from dcp_core.logs import LOGGER_NAME

__all__ = ["LOGGER_NAME"]
