"""Plug-ins of the project `dcp`: hook specifications, and discovery of installed plug-ins by name.

Names are imported on first use, because plug-in modules import this package and must be quick to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base.imports import import_lazily as import_lazily
from dcp_base.imports import resolve as resolve

if TYPE_CHECKING:
    from dcp_base.errors import DcpError as DcpError
    from dcp_base.errors import InvalidPlaceError as InvalidPlaceError
    from dcp_base.errors import PluginLoadError as PluginLoadError
    from dcp_base.errors import PluginNotFoundError as PluginNotFoundError
    from dcp_base.hookspecs import ANY_SCHEME as ANY_SCHEME
    from dcp_base.hookspecs import CheckpointEvent as CheckpointEvent
    from dcp_base.hookspecs import StorageBackendSpec as StorageBackendSpec
    from dcp_base.hookspecs import StoreSpec as StoreSpec
    from dcp_base.hookspecs import hookimpl as hookimpl
    from dcp_base.registry import PluginInfo as PluginInfo
    from dcp_base.registry import PluginRegistry as PluginRegistry
    from dcp_base.registry import installed as installed

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_base.errors": ("DcpError", "InvalidPlaceError", "PluginLoadError", "PluginNotFoundError"),
        "dcp_base.hookspecs": ("ANY_SCHEME", "CheckpointEvent", "StorageBackendSpec", "StoreSpec", "hookimpl"),
        "dcp_base.imports": ("import_lazily", "resolve"),
        "dcp_base.registry": ("PluginInfo", "PluginRegistry", "installed"),
    },
)
