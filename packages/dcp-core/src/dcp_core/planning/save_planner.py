"""`DefaultSavePlanner`: plans which rank writes which values of a state dict.

Source: torch 2.13 `torch.distributed.checkpoint.default_planner`.
"""

from __future__ import annotations

import copy
import io
import warnings
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dcp_core.objects.object_bytes import DumpedObject, dump_object, report_unloadable
from dcp_core.planning.even_cuts import plan_all
from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.plan_forms import MANY_RANKS
from dcp_core.planning.replicas import (
    Replicas,
    agreed_aliases,
    divergent_keys,
    explain_contradiction,
    replica_digests,
    replica_value_digest,
    report_divergence,
    value_digest,
)
from dcp_core.records.metadata import Metadata, MetadataIndex, StorageMeta
from dcp_core.records.protocols import ReplicaKey, SavePlan, SavePlanner, WriteItem, WriteItemType
from dcp_core.shards.shards import LocalTensor, find_part, find_state_dict_object
from dcp_core.state_dict.flatten import flatten, merge_paths, name_empty_mappings
from dcp_core.tables.plan_columns import columns_of
from dcp_core.tables.value_table import Held, find_ties, local_values
from dcp_core.tensors.kinds import SCALARS
from dcp_ranks.choose_coordinator import job_size

_SMALL_BYTES = 64 * 1024
_COMPARED_SHARDS = 16
_OF_A_SAVE = {"state_dict", "plan", "global_plan", "metadata", "storage_meta"}


def create_default_local_save_plan(state_dict: dict[str, Any], is_coordinator: bool) -> SavePlan:
    """Return all items that this rank holds, including replicas; `is_coordinator` has no effect."""
    del is_coordinator
    return SavePlan(local_values(state_dict).items)


def create_write_items(fqn: str, object: Any) -> list[WriteItem]:  # noqa: A002 - stock's name
    """Return the write items of a value's local chunks."""
    return list(local_values({fqn: object}).items)


class DefaultSavePlanner(SavePlanner):
    """Plans saves of nested state dicts with tensors of every kind. May be subclassed.

    ```python
    import torch
    from dcp_core import DefaultSavePlanner, save

    planner = DefaultSavePlanner(replicas="raise")  # refuse replicas that differ between ranks
    save({"weight": torch.ones(3)}, checkpoint_id="step-1", planner=planner)
    ```

    Args:
        flatten_state_dict: Whether each leaf of nested dicts and lists has its own FQN.
        flatten_sharded_tensors: Whether to unwrap nested ShardedTensors.
        dedup_replicated_tensors: No effect, as in stock: replicas are always written once.
        dedup_save_to_lowest_rank: Whether the lowest holder writes replicas, without balancing.
        enable_plan_caching: Whether to reuse a global plan while names, shapes, dtypes and chunks are unchanged on
            every rank.
        strict_objects: Whether to raise, not warn, for objects that loads refuse.
        replicas: For replicas that differ between ranks, `check` warns, `raise` refuses the save, `ignore` does not
            compare. Tensors are compared whole up to 64 KiB, objects up to 16 MiB; larger ones by samples.
        compare_all: Whether to compare all bytes, which reads them once more.

    Extension points: `lookup_object` and `transform_object`. A subclass that changes shape or dtype must also change
    the item's `tensor_data` in `create_local_plan`.
    """

    mappings: dict[str, tuple[str | int, ...]]

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        strict_objects: bool = False,
        replicas: Replicas = "check",
        compare_all: bool = False,
    ) -> None:
        if dedup_replicated_tensors is not None:
            warnings.warn(
                "dedup_replicated_tensors has no effect: replicas are always written once", UserWarning, stacklevel=2
            )
        if replicas not in ("check", "raise", "ignore"):
            raise ValueError(f"replicas={replicas!r} is not known; choose 'check', 'raise' or 'ignore'")
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.enable_plan_caching = enable_plan_caching
        self.strict_objects = strict_objects
        self.replicas: Replicas = replicas
        self.compare_all = compare_all
        self.mappings = {}
        self._empty: dict[str, tuple[str | int, ...]] = {}
        self._dumped: dict[str, bytes] = {}
        # Classes that a load would refuse, each warned about once.
        self._reported: set[str] = set()
        self._splittable = False

    def without_values(self) -> DefaultSavePlanner:
        """See `SavePlanner`."""
        twin = copy.copy(self)
        for name in _OF_A_SAVE & vars(twin).keys():
            delattr(twin, name)
        twin.mappings, twin._empty, twin._dumped = {}, {}, {}  # noqa: SLF001 - its own
        return twin

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See `SavePlanner`."""
        self.storage_meta = storage_meta
        self.is_coordinator = is_coordinator
        self.mappings, self._empty = {}, {}
        self._dumped = {}
        if self.flatten_state_dict:
            flat = flatten(state_dict)
            state_dict, self.mappings, self._empty = (
                flat.values,
                flat.paths,
                name_empty_mappings(flat) if flat.empty else {},
            )
            for kind, text in flat.text_keys.items():
                warnings.warn(
                    f"a key of class {kind.__qualname__} is recorded as its text, {text!r}: a load into a template "
                    "finds its value, but load_keys and conversions give back the text; use str or int keys to have "
                    "them restored",
                    UserWarning,
                    stacklevel=2,
                )
        self.state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Return this rank's items, tied tensors, and checksums of small replicas.

        UnsupportedValueError: a value cannot be saved, or fails `strict_objects`. Objects are serialized here, before
        any file is written.
        """
        values = local_values(self.state_dict)
        plain = self.writes_what_it_holds()
        digests = None if job_size() == 1 or self.replicas == "ignore" else self.replica_digests(values.held)
        items = values.items
        if plain and values.objects:
            columns = columns_of(items)
            rows = {fqn: row for row, fqn in enumerate(columns.table.object_names)}
            for fqn in values.objects:
                columns.object_bytes[rows[fqn]] = self._dump(fqn, digests)
            columns.hints = None  # as for any local plan
            items = columns.items()
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
        """Return the final plans, in which each item or part occurs once, and the metadata.

        PlanError: ranks disagree about a value, or a tensor's chunks leave a hole or overlap.
        """
        divergent = divergent_keys(all_plans)
        report_divergence(divergent, self.replicas)
        # If all ranks' plans are there, their shards must form whole tensors.
        complete = len(all_plans) > 1 or job_size() == 1
        aliases = agreed_aliases(all_plans)
        planned = (plan_columns if len(all_plans) < MANY_RANKS else plan_all)(
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
            metadata.planner_data = merge_paths(
                {id(plan.planner_data): plan.planner_data or {} for plan in all_plans}.values()
            )
            # Only the metadata needs the paths; send the plans back without them.
            plans = [replace(plan, planner_data=None) for plan in plans]
        self.adopt_global_plan(plans, metadata)
        return [replace(plan, aliases=None, digests=None) for plan in plans], metadata

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> None:
        """See `SavePlanner`."""
        self.global_plan = plans
        self.metadata = metadata

    def plan_key(self) -> Hashable | None:
        """See `SavePlanner`."""
        if not self.enable_plan_caching or type(self).create_global_plan is not DefaultSavePlanner.create_global_plan:
            return None
        kind = type(self)
        options = (self.flatten_state_dict, self.dedup_save_to_lowest_rank, self.replicas, self.compare_all)
        return kind.__module__, kind.__qualname__, options

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """See `SavePlanner`."""
        self.plan = new_plan
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """See `SavePlanner`. Thread-safe."""
        planned = write_item.tensor_data
        if self._splittable and planned is not None:  # the item may be part of a box
            fqn, chunk = write_item.index.fqn, planned.chunk
            return find_part(self.state_dict[fqn], fqn, chunk.offsets, chunk.sizes)
        found: torch.Tensor | io.BytesIO = self.transform_object(write_item, self.lookup_object(write_item.index))
        return found

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the object or shard for an index."""
        return find_state_dict_object(self.state_dict, index)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002 - stock's name
        """Return the tensor, or the object serialized as by `torch.save`."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        fqn = write_item.index.fqn
        data = self._dumped.pop(fqn, None)
        if data is None:
            data = dump_object(object, key=fqn)
            report_unloadable(data, key=fqn, strict=self.strict_objects, reported=self._reported)
        return io.BytesIO(data)

    def plain_values(self) -> Mapping[str, Any] | None:
        """See `SavePlanner`. None if a subclass overrides look-up or transformation."""
        return self.state_dict if self.writes_what_it_holds() else None

    def writes_what_it_holds(self) -> bool:
        """Return whether no subclass changes the written values."""
        kind, own = type(self), DefaultSavePlanner
        hooks = (own.resolve_data, own.lookup_object, own.transform_object)
        return (kind.resolve_data, kind.lookup_object, kind.transform_object) == hooks

    def _dump(self, fqn: str, digests: dict[ReplicaKey, int] | None) -> int:
        data = dump_object(self.state_dict[fqn], key=fqn)
        if type(self.state_dict[fqn]) not in SCALARS:
            report_unloadable(data, key=fqn, strict=self.strict_objects, reported=self._reported)
        small = len(data) <= _SMALL_BYTES
        if small:
            self._dumped[fqn] = data
        if digests is not None:
            value = self.state_dict[fqn]
            if isinstance(value, DumpedObject):
                digest = value.digest
            elif type(value) in SCALARS:  # equal ones have equal archives
                digest = b""
            else:
                digest = value_digest(value) if self.compare_all else replica_value_digest(value)
            digests[fqn] = zlib.crc32(digest or data)
        return len(data)

    def replica_digests(self, held: Mapping[str, Held]) -> dict[ReplicaKey, int]:
        """Return checksums of tensors and shards that other ranks may hold, too."""
        parts: dict[ReplicaKey, torch.Tensor] = {}
        for fqn, value in held.items():
            if not isinstance(value, LocalTensor):
                parts[fqn] = value.detach()
            elif value.shared:
                for shard in value.shards[:_COMPARED_SHARDS]:
                    parts[fqn if shard.sizes == value.size else (fqn, tuple(shard.offsets))] = shard.get()
        digests = replica_digests([*parts.values()], everything=self.compare_all)
        return {key: digest for key, digest in zip(parts, digests, strict=True) if digest is not None}
