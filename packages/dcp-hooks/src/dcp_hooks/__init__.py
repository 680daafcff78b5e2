"""Plug-ins of the project `dcp`: hook specifications, and discovery of installed plug-ins by name.

The contracts of storages, transforms and converters are defined by the packages that use them. The names of this
package are imported on first use, because plug-in modules import it and must be quick to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks.lazy_imports import import_lazily

if TYPE_CHECKING:
    from dcp_hooks.errors import DuplicatePluginError, ErrorTypes, HookError, PluginLoadError, PluginNotFoundError
    from dcp_hooks.hookspecs import (
        ANY_SCHEME,
        CheckpointEvent,
        CommandSpec,
        HookSpecs,
        StorageBackendSpec,
        StoreSpec,
        hookimpl,
    )
    from dcp_hooks.install_advice import OBJECT_STORE_SCHEMES, WEB_SCHEMES, package_for
    from dcp_hooks.progress import Progress, count_progress, find_progress, report_operation
    from dcp_hooks.registry import PluginInfo, PluginRegistry, installed, resolve

__all__ = [
    "ANY_SCHEME",
    "OBJECT_STORE_SCHEMES",
    "WEB_SCHEMES",
    "CheckpointEvent",
    "CommandSpec",
    "DuplicatePluginError",
    "ErrorTypes",
    "HookError",
    "HookSpecs",
    "PluginInfo",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginRegistry",
    "Progress",
    "StorageBackendSpec",
    "StoreSpec",
    "count_progress",
    "find_progress",
    "hookimpl",
    "import_lazily",
    "installed",
    "package_for",
    "report_operation",
    "resolve",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_hooks.errors": (
            *("DuplicatePluginError", "ErrorTypes", "HookError", "PluginLoadError", "PluginNotFoundError"),
        ),
        "dcp_hooks.hookspecs": (
            *("ANY_SCHEME", "CheckpointEvent", "CommandSpec", "HookSpecs", "StorageBackendSpec", "StoreSpec"),
            "hookimpl",
        ),
        "dcp_hooks.progress": ("Progress", "count_progress", "find_progress", "report_operation"),
        "dcp_hooks.registry": ("PluginInfo", "PluginRegistry", "installed", "resolve"),
        "dcp_hooks.install_advice": ("OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "package_for"),
    },
)
