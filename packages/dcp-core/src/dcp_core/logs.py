"""Logger names, and escaping of unprintable characters in log records."""

from dcp_base.logs import library_logger

__all__ = ["LOGGER_NAME", "library_logger"]

LOGGER_NAME = "dcp_core"
