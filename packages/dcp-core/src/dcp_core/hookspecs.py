"""Hook specifications for plug-ins, re-exported from `dcp_hooks`, from which plug-in modules import without torch."""

from dcp_hooks.hookspecs import (
    ANY_SCHEME,
    ENTRY_POINT_GROUP,
    PROJECT_NAME,
    CheckpointEvent,
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
    "HookSpecs",
    "StorageBackendSpec",
    "StoreSpec",
    "hookimpl",
    "hookspec",
]
