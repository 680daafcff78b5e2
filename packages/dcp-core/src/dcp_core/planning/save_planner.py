"""`DefaultSavePlanner`: plans which rank writes which tensors and objects of a state dict.

Source: torch 2.13 `torch.distributed.checkpoint.default_planner` (options, extension points).
"""

from __future__ import annotations

import io
import warnings
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dcp_core.objects.object_bytes import DumpedObject, dump_object, report_unloadable
from dcp_core.planning.comparable_bytes import value_digest
from dcp_core.planning.diagnose_duplicates import (
    OnDivergence,
    agreed_aliases,
    divergent_keys,
    explain_contradiction,
    report_divergence,
)
from dcp_core.planning.global_plan import plan_columns
from dcp_core.records.metadata import Metadata, MetadataIndex, StorageMeta
from dcp_core.records.plan import SavePlan, WriteItem, WriteItemType
from dcp_core.records.protocols import SavePlanner
from dcp_core.shards.fed_tensors import FedTensors, TensorFeed
from dcp_core.shards.shards import LocalTensor, find_part, find_state_dict_object
from dcp_core.state_dict.empty_mappings import merge_paths, name_empty_mappings
from dcp_core.state_dict.flatten import flatten
from dcp_core.tables.columns_of_items import columns_of
from dcp_core.tables.plan_columns import PlanColumns
from dcp_core.tables.value_table import LocalValues, find_ties, local_values
from dcp_core.tensors.element_copy import contiguous
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_ranks import job_size

__all__ = ["DefaultSavePlanner", "create_default_local_save_plan"]

_SMALL_BYTES = 64 * 1024
_OF_A_SAVE = {"state_dict", "plan", "global_plan", "metadata", "storage_meta", "feed", "fed_tensors"}


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:
    """Return the local save plan of a flat state dict: all items that this rank holds, including replicated items.

    Args:
        state_dict: FQN → tensor of any kind, or object.
        is_coordinator: No effect, accepted as in stock: every rank plans all items that it holds.
    """
    del is_coordinator
    return SavePlan(local_values(state_dict).items)


class DefaultSavePlanner(SavePlanner):
    """Default save planner: plans nested state dicts with tensors of every kind. May be subclassed.

    Args:
        flatten_state_dict: Whether each leaf of nested dicts and lists has its own FQN.
        flatten_sharded_tensors: Whether to unwrap a ShardedTensor whose local shard is a ShardedTensor.
        dedup_replicated_tensors: No effect, accepted as in stock: replicas are always written once.
        dedup_save_to_lowest_rank: Whether replicas are written by the lowest rank that holds them, instead of being
            balanced over ranks.
        enable_plan_caching: Whether to reuse the global plan of an earlier save if names, shapes, dtypes and chunks of
            all tensors and objects are the same on every rank.
        strict_objects: Whether to raise, instead of warning, for objects that a later load would refuse.
        on_divergence: Reaction to replicas that differ between ranks: `warn`, `error` or `ignore`. Objects and ordinary
            tensors in host memory of up to 64 KiB each are compared.
        compare_all: Whether to compare objects and ordinary tensors of every size, which reads each of them once more.

    Extension points: `lookup_object` (the tensor or object of an item) and `transform_object` (its form in the file). A
    subclass that changes shape or dtype must change the item's `tensor_data` in `create_local_plan` as well.

    Example:
        ```python
        import torch
        from dcp_core import DefaultSavePlanner, save

        planner = DefaultSavePlanner(on_divergence="error")  # refuse replicas that differ between ranks
        save({"weight": torch.ones(3)}, checkpoint_id="step-1", planner=planner)
        ```
    """

    mappings: dict[str, tuple[str | int, ...]]
    feed: TensorFeed | None = None
    """Source of tensors whose memory must not be read, in a save of an asynchronous saver; None in other saves."""
    fed_tensors: FedTensors | None = None
    """The tensors of the current save that come from `feed`."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        strict_objects: bool = False,
        on_divergence: OnDivergence = "warn",
        compare_all: bool = False,
    ) -> None:
        if dedup_replicated_tensors is not None:
            warnings.warn(
                "dedup_replicated_tensors has no effect: replicas are always written once", UserWarning, stacklevel=2
            )
        if on_divergence not in ("warn", "error", "ignore"):
            raise ValueError(f"on_divergence={on_divergence!r} is not known; choose 'warn', 'error' or 'ignore'")
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.enable_plan_caching = enable_plan_caching
        self.strict_objects = strict_objects
        self.on_divergence: OnDivergence = on_divergence
        self.compare_all = compare_all
        self.mappings = {}
        self._empty: dict[str, tuple[str | int, ...]] = {}
        self._dumped: dict[str, bytes] = {}
        # Classes that would not load back; each is warned about once.
        self._reported: set[str] = set()
        self._splittable = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy in another process plans other saves: values, and plans of them, are not copied.
        kept = {name: value for name, value in vars(self).items() if name not in _OF_A_SAVE}
        return {**kept, "mappings": {}, "_empty": {}, "_dumped": {}}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict of this save, and flatten it."""
        self.storage_meta = storage_meta
        self.is_coordinator = is_coordinator
        self.mappings, self._empty = {}, {}
        self._dumped = {}
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            state_dict, self.mappings, self._empty = flat.values, flat.paths, name_empty_mappings(flat)
            _warn_of_text_keys(flat.text_keys)
        self.state_dict = state_dict
        self.fed_tensors = None if self.feed is None else FedTensors.of(self.feed, state_dict, self._find)

    def create_local_plan(self) -> SavePlan:
        """Return the local plan: all items that this rank holds, tied tensors, and checksums of small replicas.

        Objects are serialized here, so an object that cannot be saved raises before any file is written.

        Raises:
            UnsupportedValueError: A tensor or object cannot be saved; the message names its FQN and the reason.
            UnloadableObjectError: A later load would refuse an object, and `strict_objects` is set.
        """
        values = local_values(self.state_dict)
        plain = self._writes_what_it_holds()
        digests = self._digests(values)
        items = values.items
        if plain and values.objects:
            sizes = {fqn: self._dump(fqn, digests) for fqn in values.objects}
            items = _with_object_sizes(items, sizes)
        self._splittable = plain and values.usual
        plan = SavePlan(
            items,
            planner_data={**self.mappings, **self._empty} if self.flatten_state_dict else None,
            aliases=(find_ties(values.held.items()) or None) if plain else None,
            digests=digests,
            splittable=self._splittable,
        )
        self.plan = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the final plans of all ranks, in rank order, and the checkpoint's metadata.

        Each item is in the plan of exactly one rank, or its parts are in the plans of several ranks.

        Raises:
            PlanError: Ranks disagree about a tensor or object, or the chunks of a tensor leave a hole or overlap.
        """
        divergent = divergent_keys(all_plans)
        report_divergence(divergent, self.on_divergence)
        complete = _holds_whole_job(all_plans)
        aliases = agreed_aliases(all_plans)
        planned = plan_columns(
            all_plans,
            aliases,
            complete=complete,
            to_lowest_rank=self.dedup_save_to_lowest_rank,
            pinned_to_lowest=divergent,
        )
        if planned is None:
            raise explain_contradiction(all_plans, aliases, complete=complete)
        plans, metadata = planned
        if self.flatten_state_dict:
            metadata.planner_data = merge_paths(plan.planner_data or {} for plan in all_plans)
            # Only the metadata needs the paths from here on; plans travel back without them.
            plans = [replace(plan, planner_data=None) for plan in plans]
        self.adopt_global_plan(plans, metadata)
        return [replace(plan, aliases=None, digests=None) for plan in plans], metadata

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> None:
        """Set the global plan of this save. Called on the coordinator.

        Args:
            plans: Final plans of all ranks, in rank order: new, or from the plan cache.
            metadata: Metadata of the checkpoint.
        """
        self.global_plan = plans
        self.metadata = metadata

    def plan_key(self) -> Hashable | None:
        """Return the planner's options as the key of the plan cache; None if plans must not be cached."""
        if not self.enable_plan_caching or type(self).create_global_plan is not DefaultSavePlanner.create_global_plan:
            return None
        kind = type(self)
        options = (self.flatten_state_dict, self.dedup_save_to_lowest_rank, self.on_divergence, self.compare_all)
        return kind.__module__, kind.__qualname__, options

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the final plan of this rank, exactly as the coordinator has sent it."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor or serialized object that an item writes. Called from several writer threads.

        Raises:
            UnsupportedValueError: The tensor comes from a feed, in pieces only.
        """
        found: torch.Tensor | io.BytesIO = self._find(write_item)
        if self.fed_tensors is not None:
            self.fed_tensors.check(write_item, found)
        return found

    def _find(self, write_item: WriteItem) -> Any:
        planned = write_item.tensor_data
        if self._splittable and planned is not None:  # it may be a part of a box
            fqn, chunk = write_item.index.fqn, planned.chunk
            return find_part(self.state_dict[fqn], fqn, chunk.offsets, chunk.sizes)
        return self.transform_object(write_item, self.lookup_object(write_item.index))

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object with the FQN in `index`, or the local memory of the shard at the offset in `index`."""
        return find_state_dict_object(self.state_dict, index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - stock's name
        """Return the data to write for a tensor or object: the tensor, or the object serialized as by `torch.save`."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return object
        fqn = write_item.index.fqn
        data = self._dumped.pop(fqn, None)
        if data is None:
            data = dump_object(object, key=fqn)
            report_unloadable(data, key=fqn, strict=self.strict_objects, reported=self._reported)
        return io.BytesIO(data)

    def plain_values(self) -> Mapping[str, Any] | None:
        """Return the flat state dict; None if a subclass overrides how tensors are looked up or transformed."""
        return self.state_dict if self._writes_what_it_holds() else None

    def _writes_what_it_holds(self) -> bool:
        """Whether items are written as they are in the state dict; a subclass may look up or make other values."""
        own = DefaultSavePlanner
        hooks = ("resolve_data", "lookup_object", "transform_object")
        return all(getattr(type(self), name) is getattr(own, name) for name in hooks)

    def _dump(self, fqn: str, digests: dict[str, int] | None) -> int:
        """Serialize an object and return its size in bytes; a small one is kept for writing."""
        data = dump_object(self.state_dict[fqn], key=fqn)
        report_unloadable(data, key=fqn, strict=self.strict_objects, reported=self._reported)
        small = len(data) <= _SMALL_BYTES
        if small:
            self._dumped[fqn] = data
        if digests is not None and (small or self.compare_all):
            digests[fqn] = zlib.crc32(_comparable_bytes(self.state_dict[fqn], data))
        return len(data)

    def _digests(self, values: LocalValues) -> dict[str, int] | None:
        """Return checksums of small tensors that every rank should agree on; None where there is no other rank."""
        if job_size() == 1 or self.on_divergence == "ignore":
            return None
        whole = {
            fqn: held.shards[0].get() if isinstance(held, LocalTensor) else held.detach()
            for fqn, held in values.held.items()
            if not isinstance(held, LocalTensor) or held.whole
        }
        return {
            fqn: zlib.crc32(tensor_bytes(contiguous(tensor.cpu())))
            for fqn, tensor in whole.items()
            if _is_cheap(tensor) or (self.compare_all and _is_ordinary(tensor))
        }


def _warn_of_text_keys(text_keys: Mapping[type, str]) -> None:
    for kind, text in text_keys.items():
        warnings.warn(
            f"a key of class {kind.__qualname__} is recorded as its text, {text!r}: a load into a template finds its "
            "value, but load_keys and conversions give back the text; use str or int keys to have them restored",
            UserWarning,
            stacklevel=2,
        )


def _with_object_sizes(items: list[WriteItem], sizes: Mapping[str, int]) -> list[WriteItem]:
    columns = columns_of(items)
    known = zip(columns.index.object_names, columns.object_bytes.tolist(), strict=True)
    nbytes = np.array([sizes.get(fqn, size) for fqn, size in known], np.int64)
    made = PlanColumns(columns.index, columns.whole, nbytes)
    made.order = columns.order
    return made.items()


def _comparable_bytes(value: Any, dumped: bytes) -> bytes:
    """Return bytes that are equal on ranks that hold the same value; `dumped` if there are no better ones."""
    return (value.digest if isinstance(value, DumpedObject) else value_digest(value)) or dumped


def _is_cheap(tensor: torch.Tensor) -> bool:
    """Whether the checksum of a tensor is cheap: few bytes, and in this process's memory."""
    cheap = tensor.device.type == "cpu" and tensor.numel() * tensor.dtype.itemsize <= _SMALL_BYTES
    return cheap and _is_ordinary(tensor)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are the bytes of its memory."""
    return not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _holds_whole_job(all_plans: list[SavePlan]) -> bool:
    """Whether the plans come from all ranks, so that their shards must make up whole tensors."""
    return len(all_plans) > 1 or job_size() == 1
