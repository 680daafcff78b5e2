"""`DefaultLoadPlanner`: plans which items a rank reads into the tensors of a template.

Source: torch 2.13 `torch.distributed.checkpoint.default_planner`.
"""

from __future__ import annotations

import copy
import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from dcp_core.errors import CorruptCheckpointError, DcpError, MissingKeyError, NotEnoughMemoryError, PlanError
from dcp_core.objects.object_bytes import load_object
from dcp_core.planning.load_report import LoadMismatchError, suggest
from dcp_core.planning.read_items import LoadRules, LocalLoadPlan, plan_local_load
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.metadata import STORAGE_TYPES, Metadata, MetadataIndex, TensorStorageMetadata
from dcp_core.records.protocols import LoadPlan, LoadPlanner, ReadItem
from dcp_core.shards.meta_tensors import materialise_meta
from dcp_core.shards.shards import box_view, find_state_dict_object
from dcp_core.state_dict.flatten import (
    FlatState,
    KeyMap,
    Path,
    assign,
    child_at,
    flatten,
    is_empty_mapping,
    real_key,
    restore_empty_mappings,
    set_element,
)
from dcp_core.tensors.kinds import children_of, zero_tensor
from dcp_manifest.index.columns import PathElement
from dcp_manifest.index.literal_keys import LiteralKey

_TOP = "top"


def create_default_local_load_plan(state_dict: dict[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """Return a flat template's plan; LoadMismatchError lists all mismatches."""
    rules = LoadRules(allow_missing=not strict, allow_lossy_casts=True)
    planned = plan_local_load(state_dict, as_metadata(metadata), rules)
    if planned.problems:
        raise LoadMismatchError(planned.problems)
    return LoadPlan(planned.items)


def create_read_items(fqn: str, md: STORAGE_TYPES, obj: Any) -> list[ReadItem]:
    """Return the read items of one value."""
    return list(create_default_local_load_plan({fqn: obj}, Metadata({fqn: md})).items)


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """Return the plans unchanged."""
    return all_plans


class DefaultLoadPlanner(LoadPlanner):
    """Fills a template (a nested state dict) in place, with resharding. May be subclassed.

    ```python
    import torch
    from dcp_core import DefaultLoadPlanner, load, save

    save({"model": {"weight": torch.ones(3)}}, checkpoint_id="step-1")
    template = {"encoder": {"weight": torch.zeros(3)}, "head": torch.zeros(2)}
    planner = DefaultLoadPlanner(rename={"encoder": "model"}, allow_partial_load=True)
    report = load(template, checkpoint_id="step-1", planner=planner)
    ```

    Args:
        flatten_state_dict: As in the save; see `DefaultSavePlanner`.
        flatten_sharded_tensors: Whether to unwrap nested ShardedTensors.
        allow_partial_load: Whether values that the checkpoint lacks keep their contents.
        allow_lossy_casts: Whether to convert to dtypes that cannot represent all stored numbers. Lossless conversions
            are always done.
        allow_globals: Classes and functions that stored objects may use besides the default allow-list.
        trust_objects: Whether to unpickle objects without restriction, which lets a checkpoint run any code.
        strict: Whether surplus keys of the checkpoint are an error.
        allow_resize: Whether sizes may differ: elements at common indices are loaded, others stay.
        rename: FQN or prefix in the template → in the checkpoint.
        rename_regex: (pattern, replacement) for `re.sub`, for template keys that `rename` does not match.
        fill_empty: Whether empty dicts and lists get everything that the checkpoint has below them, as whole CPU
            tensors on every rank.

    Extension points: `lookup_tensor` and `transform_tensor`.
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
        fill_empty: bool = True,
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
        self.fill_empty = fill_empty
        self.initialised: list[str] = []
        """See `LoadPlanner`. Elements without stored data are zeros."""
        self._made: list[torch.Tensor] = []
        self.original_state_dict: dict[str, Any] = {}
        self.mappings: dict[str, tuple[str | int, ...]] = {}
        self.metadata: Metadata | None = None
        self.local_load: LocalLoadPlan | None = None
        self._keys: dict[str, tuple[Any, ...]] = {}
        self._empty: list[Path] = []
        self._filled: list[tuple[tuple[Any, ...], Any]] = []
        self._own_tensors: set[str] = set()

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """See `LoadPlanner`."""
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
        self.state_dict, self.mappings, self._keys, self._empty = flat.values, flat.paths, flat.keys, flat.empty
        self._filled, self._own_tensors = [], set()

    def create_local_plan(self) -> LoadPlan:
        """Return the read items; LoadMismatchError lists all mismatches."""
        metadata = self._metadata()
        if self.flatten_state_dict:
            surplus = metadata.state_dict_metadata.keys() - self.state_dict.keys()
            if surplus:
                self._follow_stored_names(metadata, surplus)
            if surplus or self._empty:
                self._plan_empty(metadata)
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
        self.local_load.absent = [self.mappings.get(name, (name,)) for name in self.local_load.missing]
        if self._made:
            self._initialise([*self.local_load.missing, *self.local_load.resized])
        return LoadPlan(self.local_load.items)

    def _initialise(self, names: Iterable[str]) -> None:
        made = {id(tensor) for tensor in self._made}
        self.initialised = [name for name in names if id(self.state_dict[name]) in made]
        with torch.no_grad():
            for name in self.initialised:
                zero_tensor(self.state_dict[name])

    def _follow_stored_names(self, metadata: Metadata, surplus: set[str]) -> None:
        """Flatten again if the checkpoint has other names, as saves by torch 2.3 and older do."""
        known = metadata.state_dict_metadata.keys()

        def opens(name: str) -> bool:
            stored = self.key_map.stored(name)
            return stored not in known and any(each.startswith(f"{stored}.") for each in surplus)

        if any(children_of(value) and opens(name) for name, value in self.state_dict.items()):
            self._take(flatten(self.original_state_dict, opens=opens))
            return
        old = flatten(self.original_state_dict, descend_plain=False)
        if surplus & old.values.keys():
            self._take(old)

    def _plan_empty(self, metadata: Metadata) -> None:
        stored, paths = metadata.state_dict_metadata, metadata.planner_data or {}
        holds_empty = len(paths) > len(stored)  # their names are only in `paths`
        if not (stored.keys() - self.state_dict.keys() or (self._empty and holds_empty)):
            return
        lists = [
            self.mappings[name]
            for name, value in self.state_dict.items()
            if type(value) is list and not value and self.key_map.stored(name) not in stored
        ]
        empty = {path: _Empty(self.original_state_dict, path) for path in [*self._empty, *lists]}
        renamed = {as_stored: path for path in empty if (as_stored := self.key_map.stored(_text(path))) != _text(path)}
        for name, path in paths.items() if empty else ():
            entry = stored.get(name)
            if entry is None and not is_empty_mapping(name, path):
                continue
            for depth in range(1, len(path)):
                head = renamed.get(_text(path[:depth]), path[:depth]) if renamed else path[:depth]
                found = empty.get(head)
                if found is not None and found.takes(path[depth]):
                    below = found.below(path[depth:])
                    fqn = name if head == path[:depth] else _text((*head, *below))
                    if self.key_map.stored(fqn) == name:
                        found.stored.append((fqn, below, entry))
                    break
        self._fill([each for each in empty.values() if each.stored])

    def _fill(self, containers: list[_Empty]) -> None:
        for each in containers:
            name = _text(each.path)
            if each.is_optimizer and self.is_coordinator:
                what = (
                    "whole tensors on the CPU are loaded there on every rank, which a sharded optimizer cannot use"
                    if self.fill_empty
                    else "nothing of it is restored"
                )
                warnings.warn(
                    f"{name!r} is the state of an optimizer that has taken no step, so that it is empty in the "
                    f"template: {what}. Load into app_state(model, optimizer), or into get_optimizer_state_dict(model, "
                    "optimizer), which have an entry for each parameter",
                    UserWarning,
                    stacklevel=2,
                )
            if not self.fill_empty:
                continue
            nested: dict[Any, Any] = {}
            for fqn, below, entry in each.stored:
                path = (*each.path, *below)
                if entry is None:
                    set_element(nested, (_TOP, *below), {})
                    continue
                value = _unfilled(fqn, entry) if isinstance(entry, TensorStorageMetadata) else entry
                set_element(nested, (_TOP, *below), value)
                real = tuple(element.value if isinstance(element, LiteralKey) else element for element in below)
                self.state_dict[fqn], self.mappings[fqn] = value, path
                self._own_tensors.add(fqn)
                self._keys[fqn] = (*each.keys, *real)
            self.state_dict.pop(name, None)  # the empty list
            self._filled.append((each.keys, each.with_entries(nested[_TOP])))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """See `LoadPlanner`."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """See `LoadPlanner`."""
        if self._filled:
            self._place_filled()
        return new_plan

    def _place_filled(self) -> None:
        for keys, container in self._filled:
            assign(self.original_state_dict, keys, container)
        self._filled.clear()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner`. UnsafeCheckpointError if a global is not allowed."""
        fqn = read_item.dest_index.fqn
        loaded = load_object(
            value.getvalue(), key=fqn, allow_globals=self.allow_globals, trust_objects=self.trust_objects
        )
        self.state_dict[fqn] = loaded
        if self._filled:  # a subclass may override finish_plan
            self._place_filled()
        if self.flatten_state_dict:
            assign(self.original_state_dict, self._keys[fqn], loaded)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """See `LoadPlanner`."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """See `LoadPlanner`."""

    def adopt_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """See `LoadPlanner`. Only for plain unsharded tensors that this planner created."""
        fqn = read_item.dest_index.fqn
        if fqn not in self._own_tensors or tensor.shape != self.state_dict[fqn].shape:
            return False
        self.state_dict[fqn] = tensor
        self._place_filled()
        assign(self.original_state_dict, self._keys[fqn], tensor)
        return True

    def plain_targets(self) -> Mapping[str, Any] | None:
        """See `LoadPlanner`. None if a subclass overrides the look-up."""
        kind, own = type(self), DefaultLoadPlanner
        hooks = (own.resolve_tensor, own.lookup_tensor, own.transform_tensor, own.commit_tensor)
        if (kind.resolve_tensor, kind.lookup_tensor, kind.transform_tensor, kind.commit_tensor) != hooks:
            return None
        return self.state_dict if vars(self).keys().isdisjoint([hook.__name__ for hook in hooks]) else None

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the template's tensor, or this rank's shard."""
        found = find_state_dict_object(self.state_dict, index)
        if not isinstance(found, torch.Tensor):
            raise PlanError(f"{index.fqn!r} is a {type(found).__qualname__} in the template, not a tensor")
        return found

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the elements that an item fills."""
        return box_view(tensor, read_item.dest_offsets, read_item.lengths, key=read_item.dest_index.fqn)

    def _metadata(self) -> Metadata:
        if self.metadata is None:
            raise DcpError(f"{type(self).__name__} needs the checkpoint's metadata; pass it to set_up_planner")
        return as_metadata(self.metadata)


class _Empty:
    def __init__(self, template: dict[str, Any], path: Path) -> None:
        self.path = path
        self.stored: list[tuple[str, Path, Any]] = []
        self.keys: tuple[Any, ...] = ()
        self.container: Any = template
        for element in path:
            above: Any = self.container
            key = real_key(above, element) if isinstance(above, Mapping) else element
            self.keys += (key,)
            self.container = child_at(above, key)
        self.is_optimizer = path[-1] == "state" and isinstance(above, Mapping) and "param_groups" in above

    def takes(self, element: PathElement) -> bool:
        return isinstance(self.container, list) is (type(element) is int)

    def below(self, path: Path) -> Path:
        """Return a path below the container; stock stores the optimizer's parameter numbers as text."""
        if self.is_optimizer and type(path[0]) is str and path[0].isdecimal():
            return (LiteralKey.of(int(path[0])) or path[0], *path[1:])
        return path

    def with_entries(self, entries: Any) -> Any:
        if not isinstance(self.container, MutableMapping):
            return entries
        filled = copy.copy(self.container)
        filled.update(entries)
        return filled


def _text(path: Path) -> str:
    return ".".join(map(str, path))


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Loads whole CPU tensors into an empty dict, in the saved nesting.

    ```python
    import torch
    from dcp_core import EmptyStateDictLoadPlanner, load, save

    save({"model": {"weight": torch.ones(3)}, "step": 1}, checkpoint_id="step-1")
    state = {}
    load(state, checkpoint_id="step-1", planner=EmptyStateDictLoadPlanner(keys=["model"]))
    assert state["model"]["weight"].sum() == 3
    ```

    `keys` are FQNs or prefixes, None for the whole checkpoint; other arguments are `DefaultLoadPlanner`'s.

    Source: torch 2.13 `default_planner._EmptyStateDictLoadPlanner`.
    """

    def __init__(self, keys: Iterable[str] | None = None, *args: Any, **kwargs: Any) -> None:
        self.keys = {keys} if isinstance(keys, str) else None if keys is None else set(keys)
        super().__init__(*args, **kwargs)

    def _check_keys(self, paths: Mapping[str, Sequence[str | int]]) -> None:
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
        """Build the template; MissingKeyError if a key is missing."""
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
        self._own_tensors.update(flat.values)
        self.flatten_state_dict = True

    def _follow_stored_names(self, metadata: Metadata, surplus: set[str]) -> None:
        """The names are the checkpoint's."""


def _unfilled(fqn: str, entry: TensorStorageMetadata) -> torch.Tensor:
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
