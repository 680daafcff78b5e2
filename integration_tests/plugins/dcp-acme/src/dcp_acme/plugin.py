"""The hooks of this package. Names in strings are imported when they are used."""

from __future__ import annotations

from dcp_acme import watch
from dcp_base import CheckpointEvent, StorageBackendSpec, StoreSpec, hookimpl

__all__ = [
    "dcp_on_event",
    "dcp_register_converters",
    "dcp_register_state_adapters",
    "dcp_register_storage",
    "dcp_register_stores",
    "dcp_register_transforms",
]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Checkpoints in the vault."""
    return [
        StorageBackendSpec(
            scheme="acme",
            reader="dcp_acme.storage:VaultReader",
            writer="dcp_acme.storage:VaultWriter",
            guarantees=("atomic publish", "durable", "verified reads", "ranged reads"),
        )
    ]


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Their folders, for tools that need no PyTorch."""
    return [StoreSpec("acme", "dcp_acme.vault:open_store")]


@hookimpl
def dcp_register_transforms() -> dict[str, str]:
    """Deflate over blocks."""
    return {"block.acme-deflate": "dcp_acme.deflate:BlockDeflate"}


@hookimpl
def dcp_register_state_adapters() -> dict[str, str]:
    """Modules inside a `Shell`."""
    return {"acme-shell": "dcp_acme.adapter:ShellAdapter"}


@hookimpl
def dcp_register_converters() -> dict[str, str]:
    """Archives of numpy."""
    return {"npz": "dcp_acme.npz:NpzConverter"}


@hookimpl
def dcp_on_event(event: CheckpointEvent) -> None:
    """Note how long saves and loads take."""
    watch.note(event)
