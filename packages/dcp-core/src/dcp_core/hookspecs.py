"""Re-exports hook specifications. Plug-ins import `dcp_base` itself, which does not import torch."""

from dcp_base.hookspecs import (
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
