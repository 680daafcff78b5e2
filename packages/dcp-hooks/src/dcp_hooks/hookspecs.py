"""Hook specifications of the pluggy project `dcp`, and the records that plug-ins return from them.

A plug-in is a module (or object) named by an entry point of the group `dcp`. It imports nothing heavy, and names its
factories as `module:attribute`. Hooks are only for registration and events: no data passes through them, and none is
called per item.
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
"""Scheme of a storage or store that decides itself which ids it accepts."""
ENTRY_POINT_GROUP = "dcp"
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True)
class StorageBackendSpec:
    """A storage that `save` and `load` find by the scheme of a checkpoint id.

    Args:
        scheme: The scheme of ids `scheme://…`; `file` also stands for plain paths. `*` stands for schemes that are not
            registered and for which the writer's `validate_checkpoint_id` says that it can handle the id.
        reader: `module:attribute` of a factory that makes a `StorageReader` from a checkpoint id.
        writer: `module:attribute` of a factory that makes a `StorageWriter` from a checkpoint id.
        guarantees: Guarantees of the storage, as texts that tools can show, e.g. `atomic publish`, `durable`.
        fallback: Whether another plug-in's storage for the scheme takes precedence over this one.
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
        scheme: The scheme of places `scheme://…`. `*` stands for schemes that are not registered: the opener raises
            ValueError for schemes that it does not know.
        opener: `module:attribute` of a function of a URI and `storage_options=` that returns a `dcp_io.Store`. Neither
            the module nor its package imports torch.
        fallback: Whether another plug-in's store for the scheme takes precedence over this one.
    """

    scheme: str
    opener: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """An event of a save or load on one rank.

    Args:
        operation: Name of the operation: `save`, `load`, …
        phase: Name of the phase: `plan`, `write` for a save (which publishes at the end of `write`), `plan`, `read`,
            `load_state_dict` for a load; `total` for the whole operation.
        state: State of the phase: `started`, `finished` or `failed`.
        rank: Rank in the group that saves or loads.
        checkpoint_id: Checkpoint id that the caller gave; None if only the storage knows the id.
        seconds: Duration of a finished phase on this rank, including the wait for other ranks.
        bytes: Number of bytes that this rank wrote to or read from storage, for phases that do so.
        error: Text of the error.
        own_seconds: Duration of this rank's own part of the phase.
        slowest_rank: Rank whose own part took longest.
        slowest_seconds: Duration of the slowest rank's own part.
        world_size: Number of ranks that take part.
        operation_id: Identifier of this call on this rank, the same in all events of the call: several calls may run at
            a time.
        time: Time of the event, in seconds since the Unix epoch, even if another process passes the event on.
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
    world_size: int | None = None
    operation_id: str | None = None
    time: float | None = None


class HookSpecs:
    """Hook specifications; a plug-in implements any of them under the same names."""

    @hookspec
    def dcp_register_storage(self) -> Sequence[StorageBackendSpec]:
        """Return storages by URI scheme, for `save` and `load` with a `checkpoint_id` alone."""
        return ()

    @hookspec
    def dcp_register_stores(self) -> Sequence[StoreSpec]:
        """Return stores by URI scheme, for tools that read checkpoints without PyTorch: the command, the manager."""
        return ()

    @hookspec
    def dcp_register_transforms(self) -> Mapping[str, str]:
        """Return transforms: registry name (descriptor without `/version`) → `module:attribute` of the factory."""
        return {}

    @hookspec
    def dcp_register_savers(self) -> Mapping[str, str]:
        """Return asynchronous savers: name → `module:attribute` of the factory."""
        return {}

    @hookspec
    def dcp_register_state_adapters(self) -> Mapping[str, str]:
        """Return adapters between modules or optimizers and canonical tensors: name → `module:attribute`."""
        return {}

    @hookspec
    def dcp_register_converters(self) -> Mapping[str, str]:
        """Return converters: name of the format → `module:attribute` of a converter, which has `detect(path)`."""
        return {}

    @hookspec
    def dcp_register_bridges(self) -> Mapping[str, str]:
        """Return bridges: package of another library → `module:attribute` that adapts its storages and planners."""
        return {}

    @hookspec
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Observe an event of a save or load, in the thread of that save or load; exceptions are logged and dropped."""
