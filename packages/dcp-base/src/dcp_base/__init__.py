"""Plug-ins of the project `dcp`: hook specifications, and discovery of installed plug-ins by name.

Names are imported on first use, because plug-in modules import this package and must be quick to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base.imports import import_lazily, resolve

if TYPE_CHECKING:
    from dcp_base.descriptors import open_descriptor
    from dcp_base.errors import DcpError, InvalidPlaceError, PluginLoadError, PluginNotFoundError
    from dcp_base.escaping import printable, printable_bytes
    from dcp_base.hookspecs import (
        ANY_SCHEME,
        CheckpointEvent,
        StorageBackendSpec,
        StoreSpec,
        hookimpl,
    )
    from dcp_base.logs import library_logger
    from dcp_base.progress import Progress, count_progress, find_progress, report_operation
    from dcp_base.registry import PluginInfo, PluginRegistry, installed
    from dcp_base.schemes import OBJECT_STORE_SCHEMES, WEB_SCHEMES, file_path, scheme_of, without_end_slash

__all__ = [
    "ANY_SCHEME",
    "OBJECT_STORE_SCHEMES",
    "WEB_SCHEMES",
    "CheckpointEvent",
    "DcpError",
    "InvalidPlaceError",
    "PluginInfo",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginRegistry",
    "Progress",
    "StorageBackendSpec",
    "StoreSpec",
    "count_progress",
    "file_path",
    "find_progress",
    "hookimpl",
    "import_lazily",
    "installed",
    "library_logger",
    "open_descriptor",
    "printable",
    "printable_bytes",
    "report_operation",
    "resolve",
    "scheme_of",
    "without_end_slash",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_base.errors": (*("DcpError", "InvalidPlaceError", "PluginLoadError", "PluginNotFoundError"),),
        "dcp_base.hookspecs": (
            *("ANY_SCHEME", "CheckpointEvent", "StorageBackendSpec", "StoreSpec"),
            "hookimpl",
        ),
        "dcp_base.descriptors": ("open_descriptor",),
        "dcp_base.logs": ("library_logger",),
        "dcp_base.escaping": ("printable", "printable_bytes"),
        "dcp_base.schemes": (*("OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "file_path", "scheme_of", "without_end_slash"),),
        "dcp_base.progress": ("Progress", "count_progress", "find_progress", "report_operation"),
        "dcp_base.registry": ("PluginInfo", "PluginRegistry", "installed"),
    },
)
