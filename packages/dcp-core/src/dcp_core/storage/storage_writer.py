"""`ByteStorageWriter`: base class of storage writers, which writes items through a `dcp_io.StoreBackend`.

A subclass implements `_open`, which returns the backend, and `validate_checkpoint_id`.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from dcp_core.encoding.adaptive import AdaptiveChoice, adaptive_requests
from dcp_core.encoding.compression import CompressedRequest, Compression, CompressionPolicy
from dcp_core.errors import CheckpointNotFoundError, DcpError, UnsupportedValueError
from dcp_core.records.abilities import SavePlannerAbilities, abilities
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata, StorageMeta
from dcp_core.records.plan import SavePlan
from dcp_core.records.protocols import CheckpointId, SavePlanner, StorageWriter, WriteResult
from dcp_core.storage.byte_storage import ByteStorage
from dcp_core.storage.gc_pause import collector_paused
from dcp_core.storage.write_requests import column_requests
from dcp_core.tables.columns_of_items import columns_of
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tables.plan_columns import WrittenColumns
from dcp_core.tables.written_index import written_index
from dcp_io.lent_memory import MemoryLender
from dcp_io.requests import Writable
from dcp_manifest import METADATA_NAME, ManifestInfo, encode
from dcp_manifest.folders.file_names import RankIndexName, data_file_prefix
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks import check_fence

__all__ = ["ByteStorageWriter", "SavePlacement"]

_OF_A_SAVE = {
    "_opened",
    "_is_coordinator",
    "_rank",
    "_world_size",
    "_rank_local",
    "_placement",
    "_begun",
    "state_dict_cache",
}


@dataclass(frozen=True, slots=True)
class SavePlacement:
    """Message of the coordinator to each rank, sent as `SavePlan.storage_data`: save id, and names of data files.

    Attributes:
        save_id: Save id of the save, the same on all ranks.
        generation: Number of this save among the saves that replaced each other at the checkpoint id.
        world_size: Number of ranks in the save.
    """

    save_id: str
    prefix: str
    """Prefix of the file names of this rank's data files."""
    generation: int
    world_size: int


class ByteStorageWriter(ByteStorage, StorageWriter):
    """Base class of storage writers, which write items to data files and publish the index in one atomic step.

    An existing checkpoint stays complete until the new checkpoint is published. After a failed save, `abort` on every
    rank removes the files of the save; files of a killed save are removed by the next save to the same checkpoint id.

    Args:
        checkpoint_id: Id of the checkpoint to write; `reset` may replace it.
        overwrite: Whether an existing checkpoint may be replaced.
        interop: Whether to write an index that `torch.distributed.checkpoint` can load, too, if the layout of the data
            files permits that.
        compression: Transforms of the items; see `CompressionPolicy` for the forms of this setting.

    Example:
        ```python
        import torch
        from dcp_core import ByteStorageWriter, save
        from dcp_io import LocalStore, StoreBackend


        class FolderWriter(ByteStorageWriter):
            def _open(self, checkpoint_id):
                return StoreBackend(LocalStore(checkpoint_id), threads=4)

            @classmethod
            def validate_checkpoint_id(cls, checkpoint_id):
                return True


        save({"weight": torch.ones(3)}, storage_writer=FolderWriter("step-1"))
        ```
    """

    stores_aliases = True
    """True: tied tensors are stored once, and `finish` records their names in `Metadata.aliases`."""

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        *,
        overwrite: bool = True,
        interop: bool = True,
        compression: Compression = None,
    ) -> None:
        self._compression = CompressionPolicy(compression)
        self.overwrite = overwrite
        """Whether an existing checkpoint may be replaced; takes effect at the next save."""
        self._interop = interop
        self._set_id(checkpoint_id)
        self._clear()

    def _clear(self) -> None:
        self._is_coordinator = False
        self._rank = 0
        self._world_size = 1
        self._rank_local = False
        self.compression_choice: str | None = None
        """What `compression="adaptive"` chose on this rank in the last save, and why; None with other settings."""
        self._placement: SavePlacement | None = None
        self._begun = False
        self.save_id = secrets.token_hex(8)
        """Id of the current or last save, or of the next one if there was none since `reset`."""

    def lender(self) -> MemoryLender | None:
        """Return the lender of the storage's memory, in which a saver may stage; None if it would be of no use."""
        return self._backend.store.lender() if self._compression.changes_nothing else None

    def __getstate__(self) -> dict[str, Any]:
        # The state of a running save stays in its process: a copy elsewhere begins without one.
        return {name: value for name, value in vars(self).items() if name not in _OF_A_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clear()

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new save; a `checkpoint_id` replaces the one of the constructor."""
        if checkpoint_id is not None:
            self._set_id(checkpoint_id)
        self._reopen()
        self._clear()

    def renew_save_id(self) -> None:
        """Choose a new save id if a save with the writer's save id has begun."""
        if self._begun:
            self._begun, self.save_id = False, secrets.token_hex(8)

    @property
    def rank(self) -> int:
        """Rank of this process in the group of the current or last save."""
        return self._rank

    @property
    def use_collectives(self) -> bool:
        """Whether the ranks of the current or last save plan together, with a coordinator."""
        return not self._rank_local

    def storage_meta(self) -> StorageMeta | None:
        """Return the checkpoint id and the save id; after planning, the save id is the same on all ranks."""
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the writer for a save on this rank.

        Args:
            is_coordinator: Whether this rank is the coordinator.
            args: Not used; subclasses may use them.
            kwargs: `rank` and `use_collectives`; for a save without a coordinator also `world_size`, and the `save_id`
                that all ranks use.
        """
        del args
        self._reopen()
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._world_size = kwargs.get("world_size", 1)
        self._rank_local = not kwargs.get("use_collectives", True)
        if self._rank_local:
            save_id = kwargs.get("save_id")
            if save_id is None:
                raise DcpError(f"rank {self._rank}: a save without collectives needs a save id that all ranks agree on")
            self._backend.begin_rank_local_save(save_id, self._rank, overwrite=self.overwrite)
            self._take(self._place(save_id, self._rank))

    def _place(self, save_id: str, rank: int, prefix: str | None = None) -> SavePlacement:
        return SavePlacement(save_id, prefix or data_file_prefix(rank), self._backend.generation, self._world_size)

    def _take(self, placement: SavePlacement) -> None:
        self._placement, self.save_id, self._begun = placement, placement.save_id, True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save in storage, and add a `SavePlacement` (save id, file names) to each rank's plan.

        Raises:
            SaveInProgressError: Another running save writes to this checkpoint id.
            CheckpointExistsError: A checkpoint with this id exists, and `overwrite` is False.
        """
        return self._begin(plans, [None] * len(plans))

    def placed_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add a `SavePlacement` to the plans from a subclass's `prepare_global_plan`; begins the save if necessary.

        Needed for subclasses in stock's style, whose `prepare_global_plan` does not call the method of this class, but
        sets storage data with a `prefix` for the names of a rank's data files.

        Ranks: the coordinator; every rank in a save without a coordinator.
        """
        kind = type(self)
        if kind.write_data is not ByteStorageWriter.write_data and kind.finish is not ByteStorageWriter.finish:
            return plans  # it does not write by way of this class
        prefixes = [getattr(plan.storage_data, "prefix", None) for plan in plans]
        placed = [isinstance(plan.storage_data, SavePlacement) for plan in plans]
        return plans if all(placed) or None in prefixes else self._begin(plans, prefixes)

    def _begin(self, plans: list[SavePlan], prefixes: Sequence[str | None]) -> list[SavePlan]:
        """Begin the save, and assign each rank its placement, with the prefix of its file names if given."""
        if not self._rank_local:
            self.renew_save_id()
            self._world_size = len(plans)
            save_id = self._backend.begin_save(overwrite=self.overwrite, save_id=self.save_id)
            self._take(self._place(save_id, self._rank))
        ranks = [self._rank] if self._rank_local else range(len(plans))
        return [
            replace(plan, storage_data=self._place(self.save_id, rank, prefix))
            for rank, plan, prefix in zip(ranks, plans, prefixes, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write all items of the plan; the data is durable when `write_data` returns."""
        placement = plan.storage_data
        if not isinstance(placement, SavePlacement):
            raise DcpError(
                f"rank {self._rank}: the plan lost its storage data ({type(placement).__name__}); a planner's "
                "finish_plan must keep SavePlan.storage_data"
            )
        begun_here = self._placement is not None and self._placement.save_id == placement.save_id
        self._take(placement)
        if not begun_here:
            self._backend.join_save(placement.save_id)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        columns = columns_of(plan.items)
        with collector_paused():
            requests = list(column_requests(columns, planner))
        fed = abilities(planner, SavePlannerAbilities).fed_tensors
        if fed is not None:
            fed.feed.expect(sum(getattr(request, "urgent", False) for request in requests))
        done.set_result(LazyList(WrittenColumns(columns, self._write(requests, placement))))
        return done

    def _write(self, requests: Sequence[Writable], placement: SavePlacement) -> StoredItems:
        self.compression_choice = None
        if self._compression.adapts:
            return self._write_adaptively(requests, placement)
        if not self._compression.changes_nothing:
            requests = [CompressedRequest(request, self._compression) for request in requests]
        return self._backend.write(requests, prefix=placement.prefix, save_id=placement.save_id)

    def _write_adaptively(self, requests: Sequence[Writable], placement: SavePlacement) -> StoredItems:
        nbytes = sum(request.cost_bytes for request in requests)
        choice = AdaptiveChoice(self._compression, self._backend.url, nbytes, self._backend.threads)
        begun = time.perf_counter()
        stored = self._backend.write(
            adaptive_requests(requests, choice), prefix=placement.prefix, save_id=placement.save_id, gauge=choice
        )
        choice.end(int(stored.columns.length.sum()), time.perf_counter() - begun)
        self.compression_choice = choice.report
        return stored

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the index, which makes the checkpoint exist; then remove the files of a replaced checkpoint."""
        placement = self._placement
        if placement is None:
            raise DcpError("finish was called before a plan was prepared")
        index = written_index(metadata, results)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._checkpoint_id, save_id=placement.save_id)
        index.info = ManifestInfo(
            save_id=placement.save_id,
            world_size=placement.world_size,
            writer=_writer_name(),
            generation=placement.generation,
            rank=self._rank if self._rank_local else None,
            created_ns=time.time_ns(),
        )
        metadata.storage_data = metadata_from_index(index).storage_data
        data = encode(index, interop=self._interop)
        if self._rank_local:
            self._backend.publish(str(RankIndexName(self._rank, placement.save_id)), data)
            self._backend.publish(str(RankIndexName(self._rank, None)), data)
        else:
            check_fence()
            self._backend.publish(METADATA_NAME, data)
        self._backend.finish_save(index.files)

    def published_metadata(self, save_id: str | None = None) -> Metadata:
        """Read from storage the metadata of the last saved checkpoint, or of the one with a given save id.

        Raises:
            CheckpointNotFoundError: The checkpoint was removed, or another save has replaced it.
        """
        if save_id is None and self._placement is not None:
            save_id = self._placement.save_id
        index = self._open(self._id_to_open()).read_index()
        if index.info is None or index.info.save_id != save_id:
            raise CheckpointNotFoundError(
                f"{self._backend.url}: the checkpoint of save {save_id} has been replaced since; look at a save's "
                "metadata before the next save to the same place, or on the coordinator, which keeps it"
            )
        metadata = metadata_from_index(index)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._checkpoint_id, save_id=save_id)
        return metadata

    def measuring(self) -> ByteStorageWriter:
        """Return a writer with the same settings that writes and compresses nothing, only measures the files' sizes.

        After a save with the returned writer, its `measured_files` returns the sizes.

        Raises:
            UnsupportedValueError: The class of this writer overrides the methods that write, so sizes are not known.
        """
        own = ("write_data", "_write", "finish")
        if any(getattr(type(self), name) is not getattr(ByteStorageWriter, name) for name in own):
            raise UnsupportedValueError(f"{type(self).__qualname__} writes files of its own: their sizes are not known")
        twin = copy.copy(self)
        backend = self._open(self._id_to_open()).measuring()
        vars(twin).update(_compression=CompressionPolicy(None), _open=lambda _: backend)
        return twin

    def measured_files(self) -> dict[str, int]:
        """Return the files that this rank would have written: file name → size in bytes. Only after `measuring`."""
        return {entry.name: entry.bytes for entry in self._backend.store.list()}

    @property
    def compresses(self) -> bool:
        """Whether transforms encode items, so that the items' sizes are known only after writing."""
        return not self._compression.changes_nothing

    def abort(self, error: BaseException) -> None:
        """Remove the files that this rank has written for a save that failed with `error`."""
        del error
        if self._opened is not None:  # else nothing was written, as where the id is not that of a place
            self._opened.abort_save()


def _writer_name() -> str:
    try:
        return f"dcp-core/{version('dcp-core')}"
    except PackageNotFoundError:  # run from a source folder that is not installed
        return "dcp-core/unknown"
