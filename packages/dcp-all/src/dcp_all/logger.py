"""Mirror of `torch.distributed.checkpoint.logger`: re-exports only."""

from dcp_core.events import LOGGER_NAME
from dcp_core.events import LOGGER_NAME as DCP_LOGGER_NAME

__all__ = ["DCP_LOGGER_NAME", "LOGGER_NAME"]
