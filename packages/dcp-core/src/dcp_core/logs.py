"""The loggers of packages over `dcp_core`: the name that it logs under itself, and what makes records safe to show."""

from dcp_manifest.logs import library_logger

__all__ = ["LOGGER_NAME", "library_logger"]

LOGGER_NAME = "dcp_core"
