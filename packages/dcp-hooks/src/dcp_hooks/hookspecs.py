"""Hook specifications of the pluggy project `dcp`, and the records that plug-ins return from them.

A plug-in is a module (or object) that an entry point of the group `dcp` names. The plug-in imports nothing heavy, and
gives its factories as texts `module:attribute`. Hooks are only for registration and events: no tensor data passes
through a hook, and no hook is called once per item.
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
    "CommandSpec",
    "HookSpecs",
    "StorageBackendSpec",
    "StoreSpec",
    "hookimpl",
    "hookspec",
]

PROJECT_NAME = "dcp"
ANY_SCHEME = "*"
"""Wildcard scheme, for a storage or store that decides itself which checkpoint ids or URIs it accepts."""
ENTRY_POINT_GROUP = "dcp"
hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@dataclass(frozen=True, slots=True)
class StorageBackendSpec:
    """A storage that `save` and `load` find by the scheme of a checkpoint id.

    Args:
        scheme: URI scheme of the checkpoint ids, without `://`; `file` also stands for plain paths. `*` stands for all
            unregistered schemes; such a storage is used if `validate_checkpoint_id` of its writer accepts the id.
        reader: `module:attribute` of a factory that makes a `StorageReader` from a checkpoint id.
        writer: `module:attribute` of a factory that makes a `StorageWriter` from a checkpoint id.
        guarantees: Guarantees of the storage, as texts that tools can show, e.g. `atomic publish`, `durable`.
        fallback: Whether another plug-in's storage for the same scheme takes precedence over this storage.
    """

    scheme: str
    reader: str
    writer: str
    guarantees: tuple[str, ...] = ()
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store (reads and writes files below a URI) that `dcp_io.open_store` finds by URI scheme, without PyTorch.

    Args:
        scheme: URI scheme, without `://`. `*` stands for all unregistered schemes; the opener of such a store raises
            ValueError for schemes that it does not support.
        opener: `module:attribute` of a function that takes a URI and the keyword `storage_options`, and returns a
            `dcp_io.Store`. Neither the function's module nor its package imports torch.
        fallback: Whether another plug-in's store for the same scheme takes precedence over this store.
    """

    scheme: str
    opener: str
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A subcommand of the command `dcp`.

    Args:
        name: Name of the subcommand; a subcommand of `dcp` itself with this name takes precedence.
        command: `module:attribute` of a `click.Command`, which is imported when it runs. It returns the exit code,
            prints JSON for the option `--json`, and raises `DcpError` or `OSError` for what users can act on, which
            `dcp` prints as one line.
        summary: One sentence for the list of commands in `dcp --help`.
    """

    name: str
    command: str
    summary: str


@dataclass(frozen=True, slots=True)
class CheckpointEvent:
    """An event for observers: a phase of a save, load or other operation has started, progressed, finished or failed.

    Args:
        operation: Name of the operation: `save`, `load`, `verify`, `convert`, `compare`, `estimate`, `manage`,
            `promote`, `protect`.
        phase: Name of the phase. A save has the phases `plan` and `write`, which publishes at its end; a load has the
            phases `plan`, `read` and `load_state_dict`. `total` stands for the whole operation. An asynchronous saver
            that may copy in waves reports the copy as the phase `stage`, once it is complete. A promoter reports the
            phase `waiting` whenever it changes how many `bytes` the tier `checkpoint_id` must still get, `retry` when
            an attempt has failed, and `skip` or `drop` for a checkpoint that will not come; the trainer reports at its
            end as `left` what a tier lacks. `protect` is the copy of a host's part of a checkpoint to another host; its
            phase `skip` fails, on the coordinator, when a step is not protected.
        state: State of the phase: `started`, `progress`, `finished` or `failed`. `progress` comes a few times a second
            while a phase reads or writes, and not at all if the phase takes less than 0.15 s.
        rank: Rank in the process group that saves or loads.
        checkpoint_id: Checkpoint id that the caller gave; None if the caller gave a storage object instead.
        seconds: Duration in seconds of a phase that has finished or failed on this rank, including the wait for other
            ranks; None for other states.
        bytes: Number of bytes that this rank wrote to or read from storage in a finished phase; None for phases that
            neither write nor read items. In a `progress` event, number of bytes of the state dict that are done so
            far, before compression.
        error: Text of the error that made the phase fail; None if it has not failed.
        own_seconds: Duration in seconds of this rank's own work in a finished phase, without the wait for other ranks.
        slowest_rank: Rank whose own work in a finished phase took longest.
        slowest_seconds: Duration in seconds of that rank's own work in the phase.
        world_size: Number of ranks in the process group that saves or loads.
        operation_id: Identifier of this save or load on this rank, the same in all of its events; it distinguishes
            operations that run at the same time.
        time: Time at which the event occurred, in seconds since the Unix epoch.
        bytes_received: Number of bytes that other ranks read from storage for this rank in a finished phase of a load;
            None for other phases.
        memory_bytes: Size in bytes of the memory for the copy in a finished phase `stage`, whose `own_seconds` are
            without the wait for the storage; None for other phases.
        compression: What `compression="adaptive"` chose on this rank in a finished phase `write`, and why; else None.
        expected_bytes: In a `progress` event, the value that `bytes` will have at the end, as far as it is known;
            None in other events.
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
    compression: str | None = None


class HookSpecs:
    """Hook specifications of the project `dcp`; a plug-in implements any of them as functions of the same names."""

    @hookspec
    def dcp_register_storage(self) -> Sequence[StorageBackendSpec]:
        """Return the plug-in's storages, which `save` and `load` select by the URI scheme of a checkpoint id."""
        return ()

    @hookspec
    def dcp_register_stores(self) -> Sequence[StoreSpec]:
        """Return the plug-in's stores, which tools without PyTorch select by URI scheme to read checkpoints."""
        return ()

    @hookspec
    def dcp_register_transforms(self) -> Mapping[str, str]:
        """Return the plug-in's transforms: transform name (without `/version`) → `module:attribute` of the factory."""
        return {}

    @hookspec
    def dcp_register_savers(self) -> Mapping[str, str]:
        """Return the plug-in's savers for asynchronous saving: saver name → `module:attribute` of the factory."""
        return {}

    @hookspec
    def dcp_register_state_adapters(self) -> Mapping[str, str]:
        """Return adapters that turn modules or optimizers into state dicts and back: name → `module:attribute`."""
        return {}

    @hookspec
    def dcp_register_converters(self) -> Mapping[str, str]:
        """Return the plug-in's format converters: name of the format → `module:attribute` of the converter."""
        return {}

    @hookspec
    def dcp_register_bridges(self) -> Mapping[str, str]:
        """Return bridges: import name of another library → `module:attribute` that adapts its storages and planners."""
        return {}

    @hookspec
    def dcp_register_exchange(self) -> Mapping[str, str]:
        """Return `{"cooperative": "module:attribute"}`: a function by which ranks read a checkpoint together.

        `dcp_core.Exchange` describes the function. Without such a plug-in every rank reads for itself.
        """
        return {}

    @hookspec
    def dcp_register_commands(self) -> Sequence[CommandSpec]:
        """Return the plug-in's subcommands of the command `dcp`."""
        return ()

    @hookspec
    def dcp_register_roots(self) -> Mapping[str, str]:
        """Return roots that a file describes: name of such files → `module:attribute` of a function.

        The function is called with the path or URI of a file of this name, and returns a `dcp_io.Root`. Whatever takes
        a root takes the file, too. Neither the function's module nor its package imports torch.
        """
        return {}

    @hookspec
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        """Observe an event of a save or load; called in the thread of that save or load.

        For `progress` events, the hook is called in the threads that read or write, by one thread at a time. An
        exception that the hook raises is logged and does not reach the save or load.
        """
