"""Storages and planners as users of stock write them. Never imported: tests port its text by the import lines.

The first two are a storage that keeps one file per rank, with `torch.save` per item and a pickled Metadata; the
planners are the examples of stock's own documentation.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _metadata_fn, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult


class Writer(StorageWriter):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    def storage_meta(self) -> Any:
        return StorageMeta(checkpoint_id=str(self.path), save_id="ported")

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [dataclasses.replace(plan, storage_data=f"part_{i}_") for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        name = f"{plan.storage_data}0.bin"
        results = []
        with (self.path / name).open("wb") as stream:
            for item in plan.items:
                start = stream.tell()
                data = planner.resolve_data(item)
                if item.type == WriteItemType.BYTE_IO:
                    assert isinstance(data, io.BytesIO)
                    stream.write(data.getbuffer())
                else:
                    torch.save(data.detach().cpu().clone(), stream)
                length = stream.tell() - start
                info = _StorageInfo(name, start, length)
                results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
        future: Any = torch.futures.Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        places = {}
        for of_rank in results:
            places.update({result.index: result.storage_data for result in of_rank})
        metadata.storage_data = places
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION
        temporary = self.path / f"{_metadata_fn}.tmp"
        with temporary.open("wb") as stream:
            pickle.dump(metadata, stream)
        temporary.rename(self.path / _metadata_fn)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return "://" not in str(checkpoint_id)


class Reader(StorageReader):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def reset(self, checkpoint_id: Any = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    def read_metadata(self) -> Any:
        with (self.path / ".metadata").open("rb") as stream:
            return pickle.load(stream)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:
        self.storage_data = metadata.storage_data
        self.is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        for request in plan.items:
            place = self.storage_data[request.storage_index]
            with (self.path / place.relative_path).open("rb") as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, data)
                continue
            tensor = torch.load(data, map_location="cpu", weights_only=True)
            for dim, (start, length) in enumerate(zip(request.storage_offsets, request.lengths, strict=True)):
                tensor = tensor.narrow(dim, start, length)
            target = planner.resolve_tensor(request).detach()
            assert target.size() == tensor.size()
            target.copy_(tensor)
            planner.commit_tensor(request, target)
        future: Any = torch.futures.Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return "://" not in str(checkpoint_id)


class FP16Planner(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            if item.tensor_data is not None:
                properties = dataclasses.replace(item.tensor_data.properties, dtype=torch.float16)
                item = dataclasses.replace(
                    item, tensor_data=dataclasses.replace(item.tensor_data, properties=properties)
                )
            items.append(item)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        return data if write_item.type == WriteItemType.BYTE_IO else data.to(torch.float16)


class RenamingPlanner(DefaultLoadPlanner):
    """Loads `foo_<key>` of the checkpoint into `<key>` of the template."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.original_state_dict = state_dict
        state_dict = {"foo_" + key: value for key, value in state_dict.items()}
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class WatchingPlanner(DefaultLoadPlanner):
    """Reads everything through buffers of its own, and notes what was committed."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.committed: dict[MetadataIndex, torch.Tensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().resolve_tensor(read_item).copy_(tensor)
        self.committed[read_item.dest_index] = tensor
