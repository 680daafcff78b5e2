"""`DefaultLoadPlanner`: plans which items a rank reads into the tensors of a template.

Source: torch 2.13 `torch.distributed.checkpoint.default_planner` (options, extension points).
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dcp_core.errors import CorruptCheckpointError, DcpError, MissingKeyError, NotEnoughMemoryError, PlanError
from dcp_core.objects.object_bytes import load_object
from dcp_core.planning.load_report import LoadMismatchError, suggest
from dcp_core.planning.read_items import LoadRules, LocalLoadPlan, plan_local_load
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from dcp_core.records.plan import LoadPlan, ReadItem
from dcp_core.records.protocols import LoadPlanner
from dcp_core.shards.meta_tensors import materialise_meta
from dcp_core.shards.shards import box_view, find_state_dict_object
from dcp_core.state_dict.empty_mappings import restore_empty_mappings
from dcp_core.state_dict.flatten import FlatState, assign, flatten, set_element
from dcp_core.state_dict.key_map import KeyMap
from dcp_manifest.index.literal_keys import LiteralKey

__all__ = [
    "DefaultLoadPlanner",
    "EmptyStateDictLoadPlanner",
    "create_default_global_load_plan",
    "create_default_local_load_plan",
]


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """Return the load plan that fills a flat state dict, the template.

    Args:
        state_dict: FQN → tensor of any kind, or object.
        metadata: Metadata of the checkpoint; stock's is converted.
        strict: Whether FQNs that are missing from the checkpoint are an error.

    Raises:
        LoadMismatchError: The template does not match the checkpoint; the message lists all mismatches.
    """
    rules = LoadRules(allow_missing=not strict, allow_lossy_casts=True)
    planned = plan_local_load(state_dict, as_metadata(metadata), rules)
    if planned.problems:
        raise LoadMismatchError(planned.problems)
    return LoadPlan(planned.items)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return the load plans of all ranks unchanged, because each rank reads only for its own template."""
    return all_plans


class DefaultLoadPlanner(LoadPlanner):
    """Default load planner: fills a template (a nested state dict) in place, with resharding. May be subclassed.

    Args:
        flatten_state_dict: Whether each leaf of nested dicts and lists has its own FQN, as in the save.
        flatten_sharded_tensors: Whether to unwrap a ShardedTensor whose local shard is a ShardedTensor.
        allow_partial_load: Whether tensors and objects that are missing from the checkpoint keep their contents,
            instead of an error.
        allow_lossy_casts: Whether to convert to a dtype that cannot represent all stored numbers (float32 → bfloat16,
            float → int). Lossless conversions are always done.
        allow_globals: Classes and functions that stored objects may use in addition to the default allow-list.
        trust_objects: Whether to unpickle stored objects without restriction, which lets a checkpoint run any code.
        strict: Whether keys of the checkpoint that are not in the template are an error, too.
        allow_resize: Whether a tensor may have another size in the checkpoint: the elements at indices that both
            tensors have are loaded; the other elements of the template's tensor do not change.
        rename: FQN or prefix in the template → FQN or prefix in the checkpoint. A prefix renames all keys under it.
        rename_regex: Pairs (regular expression, replacement) as for `re.sub`, which turn a key of the template into the
            key of the checkpoint; for keys that `rename` does not rename.

    Extension points: `lookup_tensor` (the tensor that an item fills) and `transform_tensor` (the filled view of it).

    Example:
        ```python
        import torch
        from dcp_core import DefaultLoadPlanner, load, save

        save({"model": {"weight": torch.ones(3)}}, checkpoint_id="step-1")
        template = {"encoder": {"weight": torch.zeros(3)}, "head": torch.zeros(2)}
        planner = DefaultLoadPlanner(rename={"encoder": "model"}, allow_partial_load=True)
        report = load(template, checkpoint_id="step-1", planner=planner)
        ```
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        allow_lossy_casts: bool = False,
        allow_globals: Sequence[Any] = (),
        trust_objects: bool = False,
        strict: bool = False,
        allow_resize: bool = False,
        rename: Mapping[str, str] | None = None,
        rename_regex: Sequence[tuple[str | re.Pattern[str], str]] = (),
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.allow_lossy_casts = allow_lossy_casts
        self.allow_globals = tuple(allow_globals)
        self.trust_objects = trust_objects
        self.strict = strict
        self.allow_resize = allow_resize
        self.key_map = KeyMap(rename, rename_regex)
        self.initialised: list[str] = []
        """FQNs of meta tensors of the template that were allocated; elements without stored data are zeros."""
        self._made: list[torch.Tensor] = []
        self.original_state_dict: dict[str, Any] = {}
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        self.metadata: Metadata | None = None
        self.local_load: LocalLoadPlan | None = None
        self._keys: dict[str, tuple[Any, ...]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the template, the state dict to fill. Its meta tensors are replaced by tensors with memory."""
        self._made, self.initialised = [], []
        materialise_meta(state_dict, made=self._made)
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.local_load = None
        if self.flatten_state_dict:
            self._take(flatten(state_dict))
        else:
            self.state_dict = state_dict

    def _take(self, flat: FlatState) -> None:
        self.state_dict, self.mappings, self._keys = flat.values, flat.paths, flat.keys

    def create_local_plan(self) -> LoadPlan:
        """Return this rank's load plan: the read items for all tensors and objects in the template.

        Raises:
            LoadMismatchError: Keys are missing, shapes or kinds differ, casts are lossy, or the stored chunks of a
                tensor leave holes; the message lists all of these problems, with similar names.
        """
        metadata = self._metadata()
        if self.flatten_state_dict:
            self._follow_old_names(metadata)
        rules = LoadRules(
            allow_missing=self.allow_partial_load,
            allow_unexpected=not self.strict,
            allow_lossy_casts=self.allow_lossy_casts,
            allow_resize=self.allow_resize,
            keys=self.key_map,
        )
        self.local_load = plan_local_load(self.state_dict, metadata, rules)
        if self.local_load.problems:
            raise LoadMismatchError(self.local_load.problems)
        self._initialise([*self.local_load.missing, *self.local_load.resized])
        return LoadPlan(self.local_load.items)

    def _initialise(self, names: Iterable[str]) -> None:
        """Zero the tensors that this load allocated and cannot fill: the caller must not get uninitialised memory."""
        made = {id(tensor) for tensor in self._made}
        self.initialised = [name for name in names if id(self.state_dict[name]) in made]
        with torch.no_grad():
            for name in self.initialised:
                self.state_dict[name].zero_()

    def _follow_old_names(self, metadata: Metadata) -> None:
        """Use the names of torch 2.3 and older, where containers without tensors are values, if the checkpoint does."""
        surplus = metadata.state_dict_metadata.keys() - self.state_dict.keys()
        if not surplus:
            return
        old = flatten(self.original_state_dict, descend_plain=False)
        if surplus & old.values.keys():
            self._take(old)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the load plans of all ranks unchanged."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's load plan unchanged."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle a stored object, and put it into the template.

        Args:
            read_item: Item of the object.
            value: Stored bytes of the object.

        Raises:
            UnsafeCheckpointError: The object names a global that is not on the allow-list.
        """
        fqn = read_item.dest_index.fqn
        loaded = load_object(
            value.getvalue(), key=fqn, allow_globals=self.allow_globals, trust_objects=self.trust_objects
        )
        self.state_dict[fqn] = loaded
        if self.flatten_state_dict:
            assign(self.original_state_dict, self._keys[fqn], loaded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return a tensor that is a view of the elements of the template's tensor that an item fills."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing, because the item was read directly into the template's memory."""

    def plain_targets(self) -> dict[str, Any] | None:
        """Return the flat template: FQN → tensor to fill; None if a subclass overrides how tensors are looked up."""
        names = ("resolve_tensor", "lookup_tensor", "transform_tensor", "commit_tensor")
        own = (
            name in vars(self) or getattr(type(self), name) is not getattr(DefaultLoadPlanner, name) for name in names
        )
        return None if any(own) else self.state_dict

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the template's tensor with the FQN in `index`, or this rank's shard at the offset in `index`."""
        found = find_state_dict_object(self.state_dict, index)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{index.fqn!r} is a {type(found).__qualname__} in the template, not a tensor")
        return found

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the elements of `tensor` that an item fills."""
        return box_view(tensor, read_item.dest_offsets, read_item.lengths, key=read_item.dest_index.fqn)

    def _metadata(self) -> Metadata:
        if self.metadata is None:
            raise DcpError(f"{type(self).__name__} needs the checkpoint's metadata; pass it to set_up_planner")
        return self.metadata


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Load planner without a template: loads whole CPU tensors into an empty dict, in the nesting that was saved.

    Args:
        keys: Keys to load: exact FQNs, or prefixes of FQNs (`"model"` loads everything under `model.`). None loads the
            whole checkpoint.
        args: Positional arguments of `DefaultLoadPlanner`.
        kwargs: Keyword arguments of `DefaultLoadPlanner`.

    Source: torch 2.13 `default_planner._EmptyStateDictLoadPlanner`.

    Example:
        ```python
        import torch
        from dcp_core import EmptyStateDictLoadPlanner, load, save

        save({"model": {"weight": torch.ones(3)}, "step": 1}, checkpoint_id="step-1")
        state = {}
        load(state, checkpoint_id="step-1", planner=EmptyStateDictLoadPlanner(keys=["model"]))
        assert state["model"]["weight"].sum() == 3
        ```
    """

    def __init__(self, keys: Iterable[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = {keys} if isinstance(keys, str) else None if keys is None else set(keys)
        super().__init__(*args, **kwargs)

    def _check_keys(self, paths: Mapping[str, Sequence[str | int]]) -> None:
        """Raise for keys without a value in the checkpoint: a typing error should not look like an empty checkpoint."""
        known = set(self._metadata().state_dict_metadata)
        for path in paths.values():
            known.update(".".join(map(str, path[: depth + 1])) for depth in range(len(path)))
        unknown = sorted((self.keys or set()) - known)
        if unknown:
            raise MissingKeyError(
                "; ".join(f"{key!r} is not in the checkpoint{suggest(key, known)}" for key in unknown)
            )

    def _includes(self, fqn: str, path: Sequence[str | int]) -> bool:
        if self.keys is None or fqn in self.keys:
            return True
        prefixes = (".".join(map(str, path[: depth + 1])) for depth in range(len(path)))
        return any(prefix in self.keys for prefix in prefixes)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Build the template in the empty `state_dict` from the metadata of the checkpoint.

        Raises:
            ValueError: `state_dict` is not empty.
            MissingKeyError: One of `keys` matches nothing in the checkpoint.
        """
        if state_dict:
            raise ValueError("EmptyStateDictLoadPlanner builds the state dict itself: pass an empty one")
        self.metadata = metadata
        paths = self._metadata().planner_data or {}
        self._check_keys(paths)
        flat = FlatState()
        for fqn, entry in self._metadata().state_dict_metadata.items():
            path = tuple(paths.get(fqn, (fqn,)))
            if not self._includes(fqn, path):
                continue
            value = _unfilled(fqn, entry) if isinstance(entry, TensorStorageMetadata) else entry
            set_element(state_dict, path, value)
            keys = tuple(element.value if isinstance(element, LiteralKey) else element for element in path)
            flat.values[fqn], flat.paths[fqn], flat.keys[fqn] = value, path, keys
        restore_empty_mappings(state_dict, paths, include=self._includes)
        self.original_state_dict = state_dict
        self.is_coordinator = is_coordinator
        self.local_load = None
        self._take(flat)
        self.flatten_state_dict = True

    def _follow_old_names(self, metadata: Metadata) -> None:
        """Do nothing: the names are the checkpoint's own."""


def _unfilled(fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
    """Allocate memory for a whole stored tensor; not more than its chunks claim to fill."""
    promised = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if math.prod(entry.size) > promised:
        raise CorruptCheckpointError(
            f"the chunks hold {promised} elements of a tensor of shape {tuple(entry.size)}; load another checkpoint",
            key=fqn,
        )
    try:
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise NotEnoughMemoryError(
            f"{fqn!r} of shape {tuple(entry.size)} and dtype {entry.properties.dtype} does not fit into memory; load "
            "fewer keys, or shards of it into a template (and if it was never so large, the index is damaged)"
        ) from error
