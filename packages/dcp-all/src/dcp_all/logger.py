"""Mirror of `torch.distributed.checkpoint.logger`: re-exports only."""

from dcp_core.events import LOGGER_NAME as LOGGER_NAME

DCP_LOGGER_NAME = LOGGER_NAME
