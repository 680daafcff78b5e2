"""`DcpCheckpointIO`: plug-in for Lightning that saves, loads and removes checkpoints in folders or object stores.

The strategy decides which ranks call the plug-in, and with which part of the state.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection

import dcp_io
from dcp_async import AsyncSaver
from dcp_core import EmptyStateDictLoadPlanner, Metadata, load, plugins, save
from dcp_core.toolkit import library_logger

__all__ = ["META_OF_LIGHTNING", "DcpCheckpointIO", "PathLike"]

_log = library_logger(__name__)

PathLike = str | os.PathLike[str]

META_OF_LIGHTNING = "meta.pt"
"""Name of the file that Lightning's own sharded checkpoints have in addition to PyTorch's files."""

ASIDE = ".replaced"
"""Suffix given to a file at the path where a folder is saved; the file is removed when the folder is complete."""

_NEWEST = ("last", "hpc_ckpt_")  # Lightning resumes from paths of such names without a look into them


class DcpCheckpointIO:
    """Plug-in for `Trainer(plugins=[…])` and `Fabric(plugins=[…])`: checkpoints as verified, atomic folders.

    Args:
        background: `"thread"` or `"process"`, which saves in the background from a copy of the state; None returns when
            the checkpoint exists.
        storage_options: Options of the storage for all saves, loads and removals, such as an endpoint.
        writer_options: Further arguments of the storage's writer, such as `compression="auto"`.
        allow_globals: Classes and functions that stored objects may use, in addition to those that
            `torch.serialization.add_safe_globals` has allowed.

    A checkpoint that is to be removed while a save is in the background stays until that save has succeeded: until
    then it may be the last complete checkpoint. The error of a save in the background is raised by the next save, load,
    removal or `teardown`.

    Ranks: one, with a strategy that saves from rank 0 (one device, DDP); see `dcp_lightning.strategies` for others.
    Source: Lightning 2.6 `lightning.fabric.plugins.io.CheckpointIO`.
    """

    def __init__(
        self,
        *,
        background: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        writer_options: Mapping[str, Any] | None = None,
        allow_globals: Collection[Any] = (),
    ) -> None:
        self._background = background
        self._storage_options = dict(storage_options or {})
        self._writer_options = dict(writer_options or {})
        self._allow_globals = tuple(allow_globals)
        self._saver: AsyncSaver | None = None
        self._pending: list[Future[Metadata]] = []
        self._removals: dict[str, None] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save a checkpoint from this process alone; see `save`."""
        self.save(checkpoint, path, storage_options, leads=None)

    def save(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any, *, leads: bool | None) -> None:
        """Save a checkpoint; an old one at the same path can be loaded until the new one has replaced it.

        Args:
            checkpoint: This rank's part of the state.
            path: Path of a folder, or a URI that an installed storage handles.
            storage_options: Options of the storage for this save, in addition to the plug-in's.
            leads: Whether this rank is the first of the ranks that save together; None if this process saves alone.

        Raises:
            Exception: This save, or an earlier one in the background, failed.
        """
        place = _absolute(path)
        self._removals.pop(place, None)
        self.settle()
        writer, aside = self.storage(place, "writer", storage_options), place + ASIDE
        if leads is not False and _is_file(place):
            os.replace(place, aside)
        arguments = {"checkpoint_id": place, "storage_writer": writer, "no_dist": leads is None}
        if self._background is None:
            save(checkpoint, **arguments)
        else:
            if "://" not in place:  # Lightning may link to it before it is there
                os.makedirs(os.path.dirname(place), exist_ok=True)
            self._saver = self._saver or AsyncSaver(self._background)
            self._pending.append(cast(Future[Metadata], self._saver.save(checkpoint, **arguments)))
        if leads is not False and _is_file(aside):
            self.remove_checkpoint(aside)

    def load_checkpoint(self, path: PathLike, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Load a whole checkpoint, or a file that `torch.save` wrote.

        Args:
            path: Path or URI of the checkpoint, or path of the file.
            map_location: Device of the tensors, as for `torch.load`; tensors of our checkpoints are on the CPU first.
            weights_only: False unpickles all objects without restriction, which can run code from the checkpoint; any
                other value refuses objects that need a class that is not allowed.

        Raises:
            FileNotFoundError: There is no checkpoint at that path.
            UnsafeCheckpointError: An object needs a class that is not allowed.
        """
        path = self.source_of(path)
        if os.path.isfile(path):
            return torch.load(path, map_location=map_location, weights_only=weights_only)
        state = self.load_except(path, (), weights_only=weights_only, no_dist=True)
        device = _device(map_location)
        return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.to(device)) if device else state

    def source_of(self, path: PathLike) -> str:
        """Return the path or URI of the checkpoint to load: `path`, unless the save to it was not completed.

        Then it is the file that the save has moved aside; or, if `path` has a name of Lightning's newest checkpoint
        (`last…`, `hpc_ckpt_…`), the newest complete checkpoint in the same folder, with a warning in the log.
        """
        self.settle()
        place, aside = os.fspath(path), os.fspath(path) + ASIDE
        folder, name = os.path.split(place)
        moved = os.path.exists(aside)
        if os.path.isfile(place) or not (moved or name.startswith(_NEWEST)):
            return place
        store = self._open(place)
        if dcp_io.read_current(store).exists:
            return place
        if moved:
            return aside
        found = dcp_io.latest_valid(self._open(folder or os.curdir)) if store.list() or os.path.isdir(place) else None
        if found is None:
            return place
        _log.warning("the save to %s was not completed: loading %s, the newest checkpoint", place, found.store.url)
        return found.store.url

    def load_except(
        self, path: PathLike, left_out: Collection[str], *, weights_only: bool | None, no_dist: bool = False
    ) -> dict[str, Any]:
        """Load all entries of a checkpoint except `left_out`, as whole tensors on the CPU.

        For `no_dist` see `dcp_core.load`.
        """
        self.settle()
        planner = _AllBut(**self.trust(weights_only))
        planner.left_out = frozenset(left_out)
        state: dict[str, Any] = {}
        load(state, checkpoint_id=path, storage_reader=self.storage(path, "reader"), planner=planner, no_dist=no_dist)
        return state

    def trust(self, weights_only: bool | None) -> dict[str, Any]:
        """Return the arguments of a load planner that say which stored objects may be loaded."""
        allowed = (*self._allow_globals, *(item for item in torch.serialization.get_safe_globals() if callable(item)))
        return {"allow_globals": allowed, "trust_objects": weights_only is False}

    def storage(self, path: PathLike, role: Literal["reader", "writer"], extra: Mapping[str, Any] | None = None) -> Any:
        """Return a reader or writer with the plug-in's options and storage options `extra`; None without options."""
        options = {"storage_options": {**self._storage_options, **(extra or {})}}
        options.update(self._writer_options if role == "writer" else {})
        return getattr(plugins, f"open_{role}")(path, **options) if len(options) > 1 or any(options.values()) else None

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint when the saves in the background have succeeded. Other files stay."""
        self._removals[_absolute(path)] = None
        if all(future.done() for future in self._pending):
            self.settle()

    def settle(self) -> None:
        """Wait for the saves in the background, raise the error of a failed save, and then do the postponed removals.

        If a save failed, nothing is removed.
        """
        pending, self._pending = self._pending, []
        removals, self._removals = self._removals, {}
        for future in pending:
            future.result()
        for place in removals:
            if _is_file(place):
                os.remove(place)
            else:
                dcp_io.remove_checkpoint(self._open(place), also=frozenset({META_OF_LIGHTNING}))

    def teardown(self) -> None:
        """Wait for saves like `settle`, and end the background thread or process; called by Lightning's Trainer."""
        saver, self._saver = self._saver, None
        try:
            self.settle()
        finally:
            if saver is not None:
                saver.close()

    def _open(self, place: str) -> dcp_io.Store:
        return dcp_io.open_store(place, storage_options=self._storage_options or None)


for _fabric in ("lightning.fabric", "lightning_fabric"):  # twins: each takes only plug-ins that it knows
    with suppress(ModuleNotFoundError):
        import_module(f"{_fabric}.plugins.io.checkpoint_io").CheckpointIO.register(DcpCheckpointIO)


class _AllBut(EmptyStateDictLoadPlanner):
    """Planner that loads all entries of a checkpoint except some."""

    left_out: frozenset[str] = frozenset()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Set the keys to load: the names of all entries except those left out."""
        if metadata is not None and self.left_out:
            self.keys = {str(path[0]) for path in (metadata.planner_data or {}).values()} - self.left_out
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _absolute(path: PathLike) -> str:
    plugins.storage_for(os.fspath(path))  # refuses a path that no storage handles
    return os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)


def _is_file(path: str) -> bool:
    return os.path.islink(path) or os.path.isfile(path)


def _device(map_location: Any) -> torch.device | None:
    """Return the device on which `torch.load` would place tensors saved on the CPU; None for the CPU."""
    if callable(map_location):
        storage = map_location(torch.empty(0, device="cpu").untyped_storage(), "cpu")
        return None if storage is None else storage.device
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)
