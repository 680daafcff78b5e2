"""`DcpCheckpointIO`: Lightning plug-in for checkpoints in directories or object stores."""

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
from dcp_base.logs import library_logger
from dcp_core import EmptyStateDictLoadPlanner, Metadata, load, plugins, save
from dcp_io.saves.cleanup import read_current

_log = library_logger(__name__)

PathLike = str | os.PathLike[str]

META_OF_LIGHTNING = "meta.pt"
ASIDE = ".replaced"
"""Suffix of a file that a new directory replaces, until the directory is complete."""

_NEWEST = ("last", "hpc_ckpt_")  # Lightning resumes from these names without checking the contents


class DcpCheckpointIO:
    """Plug-in for `Trainer(plugins=[…])` and `Fabric(plugins=[…])`: checkpoints as verified, atomic directories.

    Args:
        background: `"thread"` or `"process"` to save a copy of the state in the background; None blocks.
        storage_options: Options of the storage, such as an endpoint.
        writer_options: Arguments of the storage's writer, such as `compression="auto"`.
        allow_globals: Globals of stored objects to allow in addition to `torch.serialization.add_safe_globals`.

    A removal waits until background saves succeeded, so a complete checkpoint remains. The next save, load, removal or
    `teardown` raises a background save's error.

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
        """Save from this process alone; see `save`."""
        self.save(checkpoint, path, storage_options, leads=None)

    def save(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any, *, leads: bool | None) -> None:
        """Save this rank's part; an old checkpoint at the path stays loadable until it is replaced.

        `leads`: whether this rank is the first that saves together; None if this process saves alone. Raises the error
        of this save, or of an earlier one in the background.
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
            if "://" not in place:  # Lightning may link to it before it exists
                os.makedirs(os.path.dirname(place), exist_ok=True)
            self._saver = self._saver or AsyncSaver(self._background)
            self._pending.append(cast(Future[Metadata], self._saver.save(checkpoint, **arguments)))
        if leads is not False and _is_file(aside):
            self.remove_checkpoint(aside)

    def load_checkpoint(self, path: PathLike, map_location: Any = None, weights_only: bool | None = None) -> Any:
        """Load a whole checkpoint, or a file by `torch.save`. Our tensors are read to the CPU before `map_location`.

        `weights_only=False` unpickles without restriction, which can run code. Otherwise an object of a class that is
        not allowed raises UnsafeCheckpointError. A missing checkpoint raises FileNotFoundError.
        """
        path = self.source_of(path)
        if os.path.isfile(path):
            return torch.load(path, map_location=map_location, weights_only=weights_only)
        state = self.load_except(path, (), weights_only=weights_only, no_dist=True)
        device = _device(map_location)
        return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.to(device)) if device else state

    def source_of(self, path: PathLike) -> str:
        """Return `path`, or its replacement after an incomplete save.

        That is the file that the save renamed, or, for Lightning's newest checkpoint (`last…`, `hpc_ckpt_…`), the
        newest complete checkpoint in the directory, with a warning.
        """
        self.settle()
        place, aside = os.fspath(path), os.fspath(path) + ASIDE
        folder, name = os.path.split(place)
        moved = os.path.exists(aside)
        if os.path.isfile(place) or not (moved or name.startswith(_NEWEST)):
            return place
        store = self._open(place)
        if read_current(store).exists:
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
        """Load all entries except `left_out`, as whole CPU tensors."""
        self.settle()
        planner = _AllBut(**self.trust(weights_only))
        planner.left_out = frozenset(left_out)
        state: dict[str, Any] = {}
        load(state, checkpoint_id=path, storage_reader=self.storage(path, "reader"), planner=planner, no_dist=no_dist)
        return state

    def trust(self, weights_only: bool | None) -> dict[str, Any]:
        """Return a load planner's arguments about allowed objects."""
        allowed = (*self._allow_globals, *(item for item in torch.serialization.get_safe_globals() if callable(item)))
        return {"allow_globals": allowed, "trust_objects": weights_only is False}

    def storage(self, path: PathLike, role: Literal["reader", "writer"], extra: Mapping[str, Any] | None = None) -> Any:
        """Return a reader or writer with the options, if there are any."""
        options = {"storage_options": {**self._storage_options, **(extra or {})}}
        options.update(self._writer_options if role == "writer" else {})
        return getattr(plugins, f"open_{role}")(path, **options) if len(options) > 1 or any(options.values()) else None

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint, but no other files, after background saves succeeded."""
        self._removals[_absolute(path)] = None
        if all(future.done() for future in self._pending):
            self.settle()

    def settle(self) -> None:
        """Wait for background saves; raise their error, or remove what was postponed."""
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
        """Wait like `settle`, and end the background thread or process."""
        saver, self._saver = self._saver, None
        try:
            self.settle()
        finally:
            if saver is not None:
                saver.close()

    def _open(self, place: str) -> dcp_io.Store:
        return dcp_io.open_store(place, storage_options=self._storage_options or None)


for _fabric in ("lightning.fabric", "lightning_fabric"):  # each package accepts only its own plug-ins
    with suppress(ModuleNotFoundError):
        import_module(f"{_fabric}.plugins.io.checkpoint_io").CheckpointIO.register(DcpCheckpointIO)


class _AllBut(EmptyStateDictLoadPlanner):
    left_out: frozenset[str] = frozenset()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        if metadata is not None and self.left_out:
            self.keys = {str(path[0]) for path in (metadata.planner_data or {}).values()} - self.left_out
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _absolute(path: PathLike) -> str:
    plugins.storage_for(os.fspath(path))  # raises if no storage handles the path
    return os.fspath(path) if "://" in os.fspath(path) else os.path.abspath(path)


def _is_file(path: str) -> bool:
    return os.path.islink(path) or os.path.isfile(path)


def _device(map_location: Any) -> torch.device | None:
    if callable(map_location):
        storage = map_location(torch.empty(0, device="cpu").untyped_storage(), "cpu")
        return None if storage is None else storage.device
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    return None if map_location is None else torch.device(map_location)
