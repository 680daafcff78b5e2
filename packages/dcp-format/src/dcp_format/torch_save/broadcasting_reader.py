"""`BroadcastingTorchSaveReader`: one rank reads a `torch.save` file and broadcasts its tensors to the other ranks.

Source: torch 2.13 `torch.distributed.checkpoint.format_utils` (names, call sequence).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    StorageMeta,
    StorageReader,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.errors import CheckpointException, CorruptCheckpointError, DcpError, UnsupportedValueError
from dcp_core.state_dict.flatten import flatten
from dcp_core.tensors.tensor_memory import copy_elements
from dcp_format.torch_save.torch_save_read import map_torch_save

_BROADCAST_BYTES = 32 << 20
Forms = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Targets = dict[str, list[tuple[ReadItem, torch.Tensor]]]


class BroadcastingTorchSaveReader(StorageReader):
    """Storage reader for a `torch.save` file that only one rank can read; to be used with `DynamicMetaLoadPlanner`.

    The file is mapped into memory and broadcast in pieces: besides its own tensors, a rank holds one piece at a time.

    Args:
        checkpoint_id: Path of the file; None if `load` gets it as its `checkpoint_id`.
        coordinator_rank: Rank that reads the file.

    Ranks: every rank of the default group, with the same names in its template; collective.

    Example:
        ```python
        import torch
        from dcp_core import load
        from dcp_format import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

        torch.save({"weight": torch.ones(3)}, "model.pt")
        state = {"weight": torch.zeros(3)}
        load(state, storage_reader=BroadcastingTorchSaveReader("model.pt"), planner=DynamicMetaLoadPlanner())
        ```
    """

    def __init__(self, checkpoint_id: str | os.PathLike[str] | None = None, coordinator_rank: int = 0) -> None:
        self.checkpoint_id = checkpoint_id
        self.coordinator_rank = coordinator_rank
        self.is_coordinator = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, from the file `checkpoint_id` unless it is None."""
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Return empty metadata: the planner makes it from the template."""
        return Metadata({}, storage_meta=StorageMeta(checkpoint_id=self.checkpoint_id))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Store whether this rank reads the file. Raises DcpError without a path."""
        del metadata, is_coordinator
        self.is_coordinator = _rank() == self.coordinator_rank
        if self.checkpoint_id is None:
            raise DcpError("no file was named: pass checkpoint_id to the reader or to load")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Broadcast the tensors of the template one after another, and copy each rank's shards into its template.

        Raises CheckpointException on every rank, before any tensor is sent, if a rank failed or a shape differs.
        """
        items: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            items[item.storage_index.fqn].append(item)
        tensors: Mapping[str, torch.Tensor] = {}
        targets: Targets = {}
        error: BaseException | None = None
        try:
            _refuse_objects(plan)
            tensors = self._tensors() if self.is_coordinator else {}
            targets = {
                name: [(item, planner.resolve_tensor(item).detach()) for item in wanted]
                for name, wanted in items.items()
            }
        except Exception as caught:  # noqa: BLE001 - raised on every rank
            error = caught
        forms: Forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        names, forms = self._agree(_wanted(items, planner), forms, error)
        for name in names:
            self._receive(*forms[name], tensors.get(name), targets.get(name, []), planner)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _tensors(self) -> dict[str, torch.Tensor]:
        state, records = map_torch_save(self.checkpoint_id or "")
        records.check_all()
        if not isinstance(state, Mapping):
            raise CorruptCheckpointError("the file holds no state dict", file=str(self.checkpoint_id))
        values = flatten(state).values
        return {name: value.detach() for name, value in values.items() if isinstance(value, torch.Tensor)}

    def _agree(
        self, wanted: dict[str, tuple[int, ...]], forms: Forms, error: BaseException | None
    ) -> tuple[list[str], Forms]:
        """Agree on the names to send, in the same order on all ranks; raises any rank's error on every rank."""
        mine: dict[str, Any] = {"wanted": wanted, "forms": forms, "error": None if error is None else repr(error)}
        gathered = _gathered(mine)
        failed = {
            rank: (error if rank == _rank() else None, each["error"])
            for rank, each in enumerate(gathered)
            if each["error"]
        }
        if failed:
            raise CheckpointException("the file cannot be read, or not into the template", failed)
        forms = gathered[self.coordinator_rank if len(gathered) > 1 else 0]["forms"]
        names = sorted({name for each in gathered for name in each["wanted"]})
        missing = [name for name in names if name not in forms]
        if missing:
            texts = dict.fromkeys(range(len(gathered)), (None, f"not in the file: {missing[:8]}"))
            values = "1 value" if len(missing) == 1 else f"{len(missing)} values"
            raise CheckpointException(f"{self.checkpoint_id} lacks {values} of the template", texts)
        others = {
            rank: (None, f"{name!r} has shape {list(shape)} in the template and {list(forms[name][1])} in the file")
            for rank, each in enumerate(gathered)
            for name, shape in each["wanted"].items()
            if tuple(shape) != tuple(forms[name][1])
        }
        if others:
            raise CheckpointException(f"the template does not fit {self.checkpoint_id}", others)
        return names, forms

    def _receive(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        source: torch.Tensor | None,
        targets: list[tuple[ReadItem, torch.Tensor]],
        planner: LoadPlanner,
    ) -> None:
        rows = shape[0] if shape else 1
        row_bytes = max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
        step = max(1, _BROADCAST_BYTES // row_bytes)
        for start in range(0, rows, step):
            length = min(step, rows - start)
            piece = torch.empty((length, *shape[1:]) if shape else (), dtype=dtype, device="cpu")
            if source is not None:
                copy_elements(piece, source.narrow(0, start, length) if shape else source)
            if _world_size() > 1 and piece.numel():
                dist.broadcast(piece.view(-1).view(torch.uint8), src=self.coordinator_rank)
            for item, target in targets:
                _copy(piece, start, item, target)
        for item, target in targets:
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint id is the path of a file."""
        return os.path.isfile(checkpoint_id)


def _refuse_objects(plan: LoadPlan) -> None:
    for item in plan.items:
        if item.type == LoadItemType.BYTE_IO:
            fqn = item.storage_index.fqn
            raise UnsupportedValueError(f"{fqn!r} is an object: this reader only supports loading Tensors")


def _wanted(items: Mapping[str, list[ReadItem]], planner: LoadPlanner) -> dict[str, tuple[int, ...]]:
    """Return names with shapes of the template or, if unknown, the extent of their parts."""
    metadata = getattr(planner, "metadata", None)
    said = {} if metadata is None else metadata.state_dict_metadata
    found: dict[str, tuple[int, ...]] = {}
    for name, parts in items.items():
        size = getattr(said.get(name), "size", None)
        ends = [[at + length for at, length in zip(item.storage_offsets, item.lengths, strict=True)] for item in parts]
        found[name] = tuple(size) if size is not None else tuple(map(max, zip(*ends, strict=True)))
    return found


def _copy(piece: torch.Tensor, start: int, item: ReadItem, target: torch.Tensor) -> None:
    if not piece.dim():
        copy_elements(target, piece)
        return
    first = max(start, item.storage_offsets[0])
    last = min(start + piece.size(0), item.storage_offsets[0] + item.lengths[0])
    if first >= last:
        return
    part = piece.narrow(0, first - start, last - first)
    for dim in range(1, piece.dim()):
        part = part.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    copy_elements(target.narrow(0, first - item.storage_offsets[0], last - first), part)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if _world_size() > 1 else 0


def _gathered(value: Any) -> list[Any]:
    if _world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * _world_size()
    dist.all_gather_object(gathered, value)
    return gathered


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Load planner that makes the metadata from the template: one chunk per tensor, with the template's dtype and size.

    Example:
        ```python
        import torch
        from dcp_core import load
        from dcp_format import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

        torch.save({"weight": torch.ones(3)}, "model.pt")
        state = {"weight": torch.zeros(3)}
        load(state, storage_reader=BroadcastingTorchSaveReader("model.pt"), planner=DynamicMetaLoadPlanner())
        ```
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Make metadata from the template; `metadata` is ignored.

        Raises:
            UnsupportedValueError: The template holds a value other than a tensor.
        """
        del metadata
        values = flatten(state_dict).values if self.flatten_state_dict else state_dict
        others = sorted(name for name, value in values.items() if not isinstance(value, torch.Tensor))
        if others:
            raise UnsupportedValueError(
                f"only tensors are loaded this way, not {others[:8]}: take them out of the template, or "
                "convert the file with torch_save_to_dcp and load the checkpoint"
            )
        entries = {name: _entry(value) for name, value in values.items()}
        super().set_up_planner(state_dict, Metadata(dict(entries)), is_coordinator)


def _entry(tensor: torch.Tensor) -> TensorStorageMetadata:
    """Return metadata with one chunk; global sizes for a DTensor."""
    size = tensor.size()
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [chunk])
