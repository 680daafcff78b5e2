"""Logger names of `dcp_core` and of packages built on it, and escaping of log records, so that they print safely."""

from dcp_manifest.logs import library_logger

__all__ = ["LOGGER_NAME", "library_logger"]

LOGGER_NAME = "dcp_core"
