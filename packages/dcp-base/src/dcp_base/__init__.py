"""Plug-ins of the project `dcp`: hook specifications, and discovery of installed plug-ins by name.

Names are imported on first use, because plug-in modules import this package and must be quick to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base.imports import import_lazily, resolve

if TYPE_CHECKING:
    from dcp_base.errors import DcpError, InvalidPlaceError, PluginLoadError, PluginNotFoundError
    from dcp_base.hookspecs import (
        ANY_SCHEME,
        CheckpointEvent,
        StorageBackendSpec,
        StoreSpec,
        hookimpl,
    )
    from dcp_base.registry import PluginInfo, PluginRegistry, installed

__all__ = [
    "ANY_SCHEME",
    "CheckpointEvent",
    "DcpError",
    "InvalidPlaceError",
    "PluginInfo",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginRegistry",
    "StorageBackendSpec",
    "StoreSpec",
    "hookimpl",
    "import_lazily",
    "installed",
    "resolve",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_base.errors": (
            "DcpError",
            "InvalidPlaceError",
            "PluginLoadError",
            "PluginNotFoundError",
        ),
        "dcp_base.hookspecs": (
            "ANY_SCHEME",
            "CheckpointEvent",
            "StorageBackendSpec",
            "StoreSpec",
            "hookimpl",
        ),
        "dcp_base.registry": (
            "PluginInfo",
            "PluginRegistry",
            "installed",
        ),
    },
)
