"""`SafetensorsWriter`: the storage writer of `save_safetensors`, whose ranks write the files of a model together.

What the files are called and when they count is in `publishing`, which rank writes what in `shared_files`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dcp_core import (
    BlockingAsyncStager,
    Metadata,
    PeerOptions,
    SavePlan,
    SavePlanner,
    StorageMeta,
    StorageWriter,
    WriteItemType,
    WriteResult,
)
from dcp_core.errors import DcpError, UnsupportedValueError
from dcp_core.toolkit import CheckpointId, KeyMap, absolute_id
from dcp_format.content.content import refuse_objects
from dcp_format.content.temporary_files import sweep
from dcp_format.export.config_files import config_files, copy_config_files
from dcp_format.export.export_options import MAX_FILE_BYTES, ExportOptions
from dcp_format.export.file_map import ExportedTensor, PlannedFile, lay_out, tensors_of
from dcp_format.export.publishing import choose_names, choose_object_names, publish_files, publish_objects
from dcp_format.export.shared_files import RankFacts, RankPart, agreed_aliases, check_settings, share_out
from dcp_format.export.split_names import SplitNames
from dcp_format.export.write_files import RankLink, check_complete, create_files
from dcp_format.safetensors.complete_set import Stamp, is_writers_name
from dcp_format.safetensors.safetensors_index import STORED_ONCE
from dcp_format.safetensors.split_files import shard_names, split_by_size
from dcp_io import LocalStore, Store, open_store
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS, Coordinator

__all__ = ["SafetensorsWriter"]


class SafetensorsWriter(StorageWriter, BlockingAsyncStager):
    """Storage writer whose ranks write whole safetensors files together, each byte once: an export in the background.

    `save_safetensors` exports now; this writer exports with `async_save` and `AsyncSaver`, or with a planner of yours.
    The files, the arguments and the errors are those of `save_safetensors`. Everything but `folder` is by keyword.

    A relative path means the working folder at the moment when the writer is made, or given another folder.

    Ranks: every rank; the coordinator makes the files, chooses their names and publishes them.

    Example:
        ```python
        import torch
        from dcp_async import AsyncSaver
        from dcp_format import SafetensorsWriter

        model = torch.nn.Linear(4, 2)
        with AsyncSaver("thread") as saver:
            writer = SafetensorsWriter("exported", dtype=torch.bfloat16)
            future = saver.save(model.state_dict(), storage_writer=writer)  # training goes on
            future.result()  # the files are there
        ```
    """

    stores_aliases = True
    """True: a tied tensor is stored under one of its names; the files' metadata names the others."""
    ids_are_paths = True
    """True: an id without a scheme is a path."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        dtype: torch.dtype | None = None,
        rename: Mapping[str, str] | None = None,
        split: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        config_from: str | os.PathLike[str] | None = None,
        timeout_seconds: float | None = None,
        peers: PeerOptions | None = None,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        self._options = ExportOptions(
            max_file_bytes=max_file_bytes,
            dtype=dtype,
            rename=rename or {},
            split=split or {},
            metadata=metadata or {},
            config_from=config_from,
            timeout_seconds=DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds,
            peers=peers,
        )
        self._names = KeyMap(self._options.rename)
        open_store(folder)  # a wrong path is an error of every rank's own
        self.reset(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new export, into the folder `checkpoint_id` unless it is None."""
        if checkpoint_id is not None:
            self.checkpoint_id: CheckpointId = checkpoint_id
            self.absolute_id: CheckpointId = absolute_id(checkpoint_id)
            """The folder, with an absolute path."""
        self.save_id = secrets.token_hex(8)
        """Id of this export, part of its files' metadata."""
        self._order: list[str] = []
        self._files: list[PlannedFile] = []
        self._indexed = True
        self._copies: dict[str, Path] = {}
        self._link = RankLink(self._options.timeout_seconds, self._options.peers)

    def _store(self) -> Store:
        return open_store(self.absolute_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return the path of the folder and the save id."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the ranks plan together. Raises DcpError for a save without a coordinator."""
        del is_coordinator, args
        if not kwargs.get("use_collectives", True):
            raise DcpError("safetensors files are planned by a coordinator: save with use_collectives=True")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with this rank's host and tied tensors. Raises UnsupportedValueError if there are objects."""
        refuse_objects(
            {item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO},
            "safetensors",
            remedy="leave them out of the state dict, or save them to another checkpoint",
        )
        self._order = [item.index.fqn for item in plan.items]
        return replace(plan, storage_data=RankFacts.of_this_rank(plan.aliases, self._options.settings))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the files in full size under temporary names; return the plans with the places of each rank's tensors.

        Raises:
            UnsupportedValueError: The format lacks a dtype.
            DuplicateKeyError, MissingKeyError: `rename` does not fit the state dict.
            DcpError: Ranks have different options.
            OSError: The disk has no space for the export.
        """
        options, store = self._options, self._store()
        self._copies = {} if options.config_from is None else config_files(options.config_from)
        facts = [RankFacts.of(plan) for plan in plans]
        check_settings(facts)
        aliases = agreed_aliases(plans, facts)
        tensors = tensors_of(
            plans, self._order, dtype=options.dtype, names=self._names, aliases=aliases, split=SplitNames(options.split)
        )
        groups = split_by_size(tensors, options.max_file_bytes, lambda tensor: tensor.nbytes)
        self.save_id = secrets.token_hex(8)
        store.make()
        wanted = shard_names(len(groups))
        if isinstance(store, LocalStore):
            folder = Path(store.path)
            sweep(store, is_writers_name)
            chosen = choose_names(folder, wanted, self.save_id, always_indexed=False)
            stamp = Stamp.next(folder, self.save_id, len(groups))
        else:
            chosen = choose_object_names(store, wanted, self.save_id)
            stamp = Stamp(self.save_id, len(groups), 1)
        self._indexed = chosen.indexed
        metadata = {"format": "pt", **options.metadata, **stamp.metadata}
        files = [
            lay_out(name, group, {**metadata, **self._ties(group, aliases)}, renamed=store.writes_ranges)
            for name, group in zip(chosen.files, groups, strict=True)
        ]
        placed = share_out(plans, files, [one.host for one in facts], ranges=store.writes_ranges)
        if store.writes_ranges:
            create_files(store, files)
        self._files = files
        return placed

    def _ties(self, group: Sequence[ExportedTensor], aliases: Mapping[str, str]) -> dict[str, str]:
        """Return a file's metadata for tied tensors: for our readers, and as `safetensors.torch.save_model` has it."""
        here = {tensor.fqn: tensor.name for tensor in group}
        torn = {tensor.fqn for tensor in group if tensor.slices} & {*aliases.values()}
        if torn:
            raise UnsupportedValueError(f"split: {min(torn)!r} has several names, of which files can keep only one")
        ties = {self._names.stored(alias): here[target] for alias, target in aliases.items() if target in here}
        return {**ties, STORED_ONCE: json.dumps(ties)} if ties else {}

    def connect_ranks(self, coordinator: Coordinator, plan: SavePlan) -> None:
        """Connect this rank to the others if ranks pass bytes on. Collective."""
        self._link.open(coordinator, plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's parts of the files, durably; returns a completed future of the items' results."""
        if not isinstance(plan.storage_data, RankPart):
            raise DcpError("the plan lost its storage data; a planner's finish_plan must keep it")
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(self._link.write(self._store(), plan, planner, threads=self._options.threads))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the export: configuration files, names of the files, index; then remove an older save's files."""
        store = self._store()
        check_complete(self._files, results)
        copy_config_files(self._copies, store)
        if isinstance(store, LocalStore):
            publish_files(Path(store.path), self._files, indexed=self._indexed)
        else:
            publish_objects(store, self._files, indexed=self._indexed)
        self._files = []
        metadata.storage_meta = self.storage_meta()

    def abort(self, error: BaseException) -> None:
        """Remove the files of a failed export."""
        del error
        self._link.close()
        for file in self._files:
            with contextlib.suppress(OSError):
                self._store().delete(file.temporary)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is a path or a URI; True, as `open_store` says which packages open a URI."""
        del checkpoint_id
        return True
