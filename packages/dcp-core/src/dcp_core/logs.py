"""Logger names of `dcp_core` and of packages built on it, and escaping of unprintable characters in log records."""

from dcp_manifest.logs import library_logger

__all__ = ["LOGGER_NAME", "library_logger"]

LOGGER_NAME = "dcp_core"
