"""Hook specifications for plug-ins, defined in `dcp_hooks`: a plug-in module imports them from there, without torch."""

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
