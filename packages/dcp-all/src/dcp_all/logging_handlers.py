"""Mirror of `torch.distributed.checkpoint.logging_handlers`: re-exports only."""

from dcp_core.events import LOGGER_NAME

DCP_LOGGER_NAME = LOGGER_NAME
