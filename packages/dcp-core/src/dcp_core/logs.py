"""The name of the logger that everything of `dcp_core` logs under."""

__all__ = ["LOGGER_NAME"]

LOGGER_NAME = "dcp_core"
