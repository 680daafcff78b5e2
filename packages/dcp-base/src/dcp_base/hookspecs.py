"""Hook specifications of the pluggy project `dcp`, and the records that plug-ins return.

A plug-in is a module or object that an entry point of the group `dcp` names. It imports nothing heavy, and names its
factories as `module:attribute`. Hooks serve registration and events: no tensor data, and no call per item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pluggy

PROJECT_NAME = "dcp"
ANY_SCHEME = "*"
"""Wildcard for a storage or store that decides itself which ids or URIs it accepts."""
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True)
class StorageBackendSpec:
    """A storage that `save` and `load` find by the scheme of a checkpoint id.

    Args:
        scheme: URI scheme without `://`; `file` also means plain paths. `*` means all unregistered schemes, if the
            writer's `validate_checkpoint_id` accepts the id.
        reader: `module:attribute` that creates a `StorageReader` from a checkpoint id.
        writer: As `reader`, for a `StorageWriter`.
        guarantees: Guarantees for tools to show, e.g. `atomic publish`, `durable`.
        fallback: Whether another plug-in's storage takes precedence.
    """

    scheme: str
    reader: str
    writer: str
    guarantees: tuple[str, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store that `dcp_io.open_store` finds by URI scheme, without PyTorch.

    Args:
        scheme: URI scheme without `://`. `*` means all unregistered schemes; the opener raises ValueError for others.
        opener: `module:attribute` of a function of a URI and `storage_options` that returns a `dcp_io.Store`. Its
            module and package do not import torch.
        fallback: Whether another plug-in's store takes precedence.
    """

    scheme: str
    opener: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """A phase of a save, load or other operation has started, progressed, finished or failed.

    Args:
        operation: `save`, `load`, `verify`, `convert`, `compare`, `estimate`, `manage`, `promote` or `protect` (copying
            a host's part of a checkpoint to another host).
        phase: `total` for the whole operation. Saves: `plan`, `write` (with publishing), and `stage` after a copy in
            waves. Loads: `plan`, `read`, `load_state_dict`. Promoters: `waiting` when the `bytes` that the tier
            `checkpoint_id` needs change, `retry` after a failed attempt, `skip` or `drop` of a checkpoint, and `left`,
            from the trainer at its end, for what a tier lacks. `protect` fails in `skip`, on the coordinator, if a step
            is not protected.
        state: `started`, `progress` (a few times a second, from 0.15 s on), `finished` or `failed`.
        rank: Rank in the process group of the operation.
        checkpoint_id: None if the caller passed a storage.
        seconds: Duration of an ended phase on this rank, including the wait for others.
        bytes: Bytes that this rank wrote or read in a finished phase. In `progress`, bytes of the state dict done so
            far, before compression.
        error: Text of the error that made the phase fail.
        own_seconds: Duration of this rank's own work in a finished phase.
        slowest_rank: Rank with the longest own work.
        slowest_seconds: Its duration.
        world_size: Number of ranks in the process group.
        operation_id: Id of this operation on this rank.
        time: Seconds since the Unix epoch.
        bytes_received: Bytes that other ranks read for this rank in a finished load phase.
        memory_bytes: Memory for the copy in a finished `stage`; its `own_seconds` exclude the wait for storage.
        expected_bytes: In `progress`, the final value of `bytes` as far as known.
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
    expected_bytes: int | None = None
    bytes_received: int | None = None
    memory_bytes: int | None = None


class HookSpecs:
    """Hooks of the project `dcp`; a plug-in implements any of them as functions of the same names."""

    @hookspec
    def dcp_register_storage(self) -> Sequence[StorageBackendSpec]:
        """Return storages, which `save` and `load` select by URI scheme."""
        return ()

    @hookspec
    def dcp_register_stores(self) -> Sequence[StoreSpec]:
        """Return stores, which tools without PyTorch select by URI scheme."""
        return ()

    @hookspec
    def dcp_register_transforms(self) -> Mapping[str, str]:
        """Return transform name (without `/version`) → `module:attribute` of the factory."""
        return {}

    @hookspec
    def dcp_register_state_adapters(self) -> Mapping[str, str]:
        """Return name → `module:attribute` of adapters that convert modules or optimizers to state dicts and back."""
        return {}

    @hookspec
    def dcp_register_converters(self) -> Mapping[str, str]:
        """Return format name → `module:attribute` of the converter."""
        return {}

    @hookspec
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Observe an event, in the thread of the save or load.

        Threads that read or write send `progress`, one at a time. Exceptions are logged and go no further.
        """
