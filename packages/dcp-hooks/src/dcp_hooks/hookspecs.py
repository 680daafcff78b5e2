"""The hooks of the pluggy project `dcp`: what a plug-in may offer, and the records that it offers it with.

A plug-in is a module (or object) named by an entry point of the group `dcp`. It imports nothing heavy and names what it
offers as `module:attribute`. Hooks register; data never flows through them, and none is called per item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pluggy

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

PROJECT_NAME = "dcp"
ANY_SCHEME = "*"
"""Scheme of a storage or store that decides by itself which ids it takes."""
ENTRY_POINT_GROUP = "dcp"
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True)
class StorageBackendSpec:
    """A storage that `save` and `load` find by the scheme of a checkpoint id.

    Args:
        scheme: Of ids `scheme://…`; `file` also stands for plain paths. `*` stands for schemes that are not
            registered and for which the writer's `validate_checkpoint_id` says that it can handle the id.
        reader: `module:attribute` of what makes a `StorageReader` from a checkpoint id.
        writer: `module:attribute` of what makes a `StorageWriter` from a checkpoint id.
        guarantees: What the storage promises, in words that tools can show, e.g. `atomic publish`, `durable`.
        fallback: Whether this stands back where another plug-in offers a storage for the scheme.
    """

    scheme: str
    reader: str
    writer: str
    guarantees: tuple[str, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store (named bytes in a folder) that `dcp_io.open_store` finds by the scheme of a place, without PyTorch.

    Args:
        scheme: Of places `scheme://…`. `*` stands for schemes that are not registered: the opener raises ValueError for
            those that it does not know.
        opener: `module:attribute` of a function of a URI and `storage_options=` that returns a `dcp_io.Store`. Neither
            the module nor its package imports torch.
        fallback: Whether this stands back where another plug-in offers a store for the scheme.
    """

    scheme: str
    opener: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """Something that happened in a save or load on one rank.

    Args:
        operation: `save`, `load`, …
        phase: Part of the operation: `plan`, `write` for a save (which publishes at the end of it), `plan`, `read`,
            `load_state_dict` for a load; `total` for all of it.
        state: `started`, `finished` or `failed`.
        rank: Rank in the group that saves or loads.
        checkpoint_id: As the caller gave it; None if the storage knows it alone.
        seconds: Duration on this rank, waiting for others included, once the phase is over.
        bytes: Bytes written to or read from storage by this rank, where the phase moves any.
        error: What failed, as text.
        own_seconds: What this rank's own part of the phase took.
        slowest_rank: The rank whose own part took longest.
        slowest_seconds: How long that was.
    """

    operation: str
    phase: str
    state: str
    rank: int
    checkpoint_id: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    error: str | None = None
    own_seconds: float | None = None
    slowest_rank: int | None = None
    slowest_seconds: float | None = None


class HookSpecs:
    """Signatures of the hooks; a plug-in implements any of them under the same names."""

    @hookspec
    def dcp_register_storage(self) -> Sequence[StorageBackendSpec]:
        """Storages by URI scheme, for `save` and `load` with nothing but a `checkpoint_id`."""
        return ()

    @hookspec
    def dcp_register_stores(self) -> Sequence[StoreSpec]:
        """Stores by URI scheme, for what looks at checkpoints without PyTorch: the command, the manager."""
        return ()

    @hookspec
    def dcp_register_transforms(self) -> Mapping[str, str]:
        """Registry name of a transform (descriptor without `/version`) → `module:attribute` of its factory."""
        return {}

    @hookspec
    def dcp_register_savers(self) -> Mapping[str, str]:
        """Name of an asynchronous saver → `module:attribute` of its factory."""
        return {}

    @hookspec
    def dcp_register_state_adapters(self) -> Mapping[str, str]:
        """Name of an adapter between modules or optimizers and canonical tensors → `module:attribute` of it."""
        return {}

    @hookspec
    def dcp_register_converters(self) -> Mapping[str, str]:
        """Name of a format → `module:attribute` of its converter, which has `detect(path)`."""
        return {}

    @hookspec
    def dcp_register_bridges(self) -> Mapping[str, str]:
        """Package of another checkpointing library → `module:attribute` of what makes its storages, planners ours."""
        return {}

    @hookspec
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Observe a save or load. Called in the thread that it happens in; exceptions are logged and dropped."""
