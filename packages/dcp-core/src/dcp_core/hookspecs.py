"""Hook specifications, re-exported from `dcp_hooks`. Plug-in modules import `dcp_hooks` itself, without torch."""

from dcp_hooks.hookspecs import (
    ANY_SCHEME,
    ENTRY_POINT_GROUP,
    PROJECT_NAME,
    CheckpointEvent,
    CommandSpec,
    HookSpecs,
    StorageBackendSpec,
    StoreSpec,
    hookimpl,
    hookspec,
)

__all__ = [
    "ANY_SCHEME",
    "ENTRY_POINT_GROUP",
    "PROJECT_NAME",
    "CheckpointEvent",
    "CommandSpec",
    "HookSpecs",
    "StorageBackendSpec",
    "StoreSpec",
    "hookimpl",
    "hookspec",
]
