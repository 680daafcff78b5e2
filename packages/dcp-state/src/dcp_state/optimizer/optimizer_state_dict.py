"""Optimizer state dicts under canonical names: get, set, and load for an FSDP1 model without an optimizer.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict` (signatures, meanings, both layouts).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dcp_core import DefaultLoadPlanner, LoadPlanner, Metadata, StorageReader, TensorStorageMetadata, load
from dcp_core.arguments import adopted
from dcp_core.errors import MissingKeyError
from dcp_core.state_dict.flatten import unflatten_state_dict
from dcp_core.storage.byte_storage import collector_paused
from dcp_core.tensors.devices import group_device
from dcp_state.adapters import installed_adapters
from dcp_state.canonical_names import ModelNames, OptimizerNames, name_model, optimizer_names
from dcp_state.model import submodule_prefixes, take_submodules
from dcp_state.optimizer.fitting import (
    GROUPS,
    PARAMS,
    STATE,
    FittedState,
    SavedOptimizer,
    fit,
    flatten_optimizer_state,
    read_saved,
    rename,
)
from dcp_state.optimizer.initial import InitialStates
from dcp_state.optimizer.inner_optimizers import Optimizers, as_optimizers
from dcp_state.options import StateDictOptions, check_options
from dcp_state.report import StateMismatchError, StateReport, class_name, named_values, nameless_state
from dcp_state.sharding import broadcast_tensors, convert_tensors, on_all_ranks


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of optimizers by canonical names of parameters; model and optimizers are not changed.

    The groups of several optimizers follow each other. A trainable parameter without state has its initial state here,
    so the result can also be the template for a load; stock takes a step with lr=0 instead. For `submodules`
    (deprecated) and `options` see `get_model_state_dict`.

    Returns:
        `{"state": {FQN: {name: value}}, "param_groups": […]}` with FQNs as `params`, or the flat form; see
        `StateDictOptions.flatten_optimizer_state_dict`. Tensors share the optimizers' memory.

    Raises:
        StateMismatchError: An optimizer has a parameter that is not in the model.
        UnsupportedValueError: The state cannot be stored by parameter name (LBFGS).
        CheckpointException: With `full_state_dict`, a rank failed; raised on all ranks.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `full_state_dict`.
    """
    options = check_options(options)
    with collector_paused():
        names = name_model(model, modifiers=options.dsd_fqn_modifiers)
        return optimizer_state([(model, names)], optimizers, options, submodules)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> StateReport:
    """Load a state dict of `get_optimizer_state_dict` into optimizers, which may have other groups and wrappers.

    `optim_state_dict` is nested or flat, or a single optimizer's `state_dict()`; it is not changed.

    Returns:
        A report of the names of state that was restored, initialised and dropped (None in stock).

    Raises:
        StateMismatchError: The state dict does not fit; no optimizer was changed, and the message has every reason.
        CheckpointException: With `broadcast_from_rank0`, a rank failed; raised on all ranks.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `broadcast_from_rank0`.
    """
    options = check_options(options)
    with collector_paused():
        names = on_all_ranks("model", lambda: name_model(model, modifiers=options.dsd_fqn_modifiers), options)
        return restore_optimizers([(model, names)], optimizers, optim_state_dict, options)


def optimizer_state(
    parts: Sequence[tuple[nn.Module, ModelNames]],
    optimizers: Optimizers,
    options: StateDictOptions,
    submodules: set[nn.Module] | None = None,
) -> dict[str, Any]:
    """See `get_optimizer_state_dict`; for modules with known names."""
    names = optimizer_names(parts)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in as_optimizers(optimizers):
        named = _name(optimizer, names, options)
        state.update(named[STATE])
        groups.extend(named[GROUPS])
    if submodules:
        prefixes = [each for _, part in parts for each in submodule_prefixes(part, submodules) or ()]
        keep = options.keep_submodule_prefixes
        state = take_submodules(state, prefixes, keep=keep)
        groups = [
            {**group, PARAMS: list(take_submodules(dict.fromkeys(group[PARAMS]), prefixes, keep=keep))}
            for group in groups
        ]
    merged: dict[str, Any] = {STATE: state, GROUPS: groups}
    if options.flatten_optimizer_state_dict:
        merged = flatten_optimizer_state(merged)
    return convert_tensors(merged, options)


def _name(optimizer: torch.optim.Optimizer, names: OptimizerNames, options: StateDictOptions) -> dict[str, Any]:
    packed = _complete(*initial_states([optimizer]), whole=names.owner is None)
    if names.owner is not None:
        owner, root, own = names.owner
        named = owner.name_optimizer_state(root, optimizer, packed, options)
        return rename(named, own.fqn)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, packed[GROUPS], strict=True)):
        fqns = [names.fqn(parameter, number, position) for position, parameter in enumerate(group[PARAMS])]
        for fqn, index in zip(fqns, packed_group[PARAMS], strict=True):
            if index in packed[STATE]:
                state[fqn] = packed[STATE][index]
        groups.append({**packed_group, PARAMS: fqns})
    return {STATE: state, GROUPS: groups}


def _complete(initial: InitialStates, *, whole: bool) -> dict[str, Any]:
    """Return `optimizer.state_dict()` with missing initial state.

    Unless parameters are `whole`, a parameter without elements here may have its state on another rank.
    """
    optimizer = initial.optimizer
    packed = optimizer.state_dict()
    _check_nameable(optimizer, packed)
    state = {index: values for index, values in packed[STATE].items() if values}
    for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, packed[GROUPS], strict=True)):
        wanted = {
            index: parameter
            for parameter, index in zip(group[PARAMS], packed_group[PARAMS], strict=True)
            if index not in state and parameter.requires_grad and (whole or parameter.numel() > 0)
        }
        made = zip(wanted, initial.of(number, [*wanted.values()]), strict=True)
        state.update({index: values for index, values in made if values})
    return {**packed, STATE: state}


def _check_nameable(optimizer: torch.optim.Optimizer, packed: Mapping[str, Any]) -> None:
    """Refuse state without a parameter, and warn of entries besides state and groups."""
    indices = {index for group in packed[GROUPS] for index in group[PARAMS]}
    nameless = [key for key in packed[STATE] if key not in indices]
    if nameless:
        raise nameless_state(optimizer, nameless)
    others = [key for key in packed if key not in (STATE, GROUPS)]
    if others:
        warnings.warn(
            f"{class_name(optimizer)}.state_dict() has entries besides state and param_groups "
            f"({', '.join(map(repr, others[:5]))}), which have no place in a state dict by names: save them as values "
            "of their own",
            UserWarning,
            stacklevel=2,
        )


def restore_optimizers(
    parts: Sequence[tuple[nn.Module, ModelNames]],
    optimizers: Optimizers,
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
) -> StateReport:
    """See `set_optimizer_state_dict`; for modules with known names of one model."""

    def prepare() -> tuple[OptimizerNames, list[InitialStates]]:
        initial = initial_states(as_optimizers(optimizers))
        for one in initial if options.broadcast_from_rank0 else ():
            one.prepare()  # the memory for this is free again before the tensors arrive
        return optimizer_names(parts), initial

    names, initial = on_all_ranks("optimizer", prepare, options)
    found = [one.optimizer for one in initial]
    if options.broadcast_from_rank0:
        saved = _broadcast(found, names, state_dict)
    elif state_dict:
        saved = read_saved(_with_names(state_dict, found, names), names.known)
    else:
        problem = "the state dict is empty; pass what get_optimizer_state_dict gave"
        raise StateMismatchError("optimizer state", [problem])
    adopt = options.broadcast_from_rank0  # the received tensors are nobody else's
    return on_all_ranks("optimizer state", lambda: restore_saved(initial, names, saved, options, adopt=adopt), options)


def initial_states(optimizers: Sequence[torch.optim.Optimizer]) -> list[InitialStates]:
    """Return optimizers with their initial states, or raise an adapter's error."""
    adapters = [installed_adapters().of_optimizer(optimizer) for optimizer in optimizers]
    for optimizer, adapter in zip(optimizers, adapters, strict=True):
        if adapter is not None:
            adapter.check(optimizer)
    return [*map(InitialStates, optimizers, adapters)]


def restore_saved(
    optimizers: Sequence[InitialStates],
    names: OptimizerNames,
    saved: SavedOptimizer,
    options: StateDictOptions,
    *,
    adopt: bool,
) -> StateReport:
    """Load saved state into each optimizer, or change none if it does not fit.

    With `adopt`, optimizers may take the saved tensors themselves.
    """
    for fqn, values in named_values(saved.state, "optimizer state").items():
        if not isinstance(values, Mapping):  # names of any type are an optimizer's own affair
            named_values(values, "optimizer state", repr(fqn))
    empty_groups = iter(saved.empty_groups)
    fitted: list[FittedState] = []
    problems: list[str] = []
    taken: set[str] = set()
    report = StateReport()
    for initial in optimizers:
        one = fit(initial, names, saved, empty_groups, options, adopt=adopt)
        fitted.append(one)
        problems += one.problems
        taken |= one.taken
        report.merge(one.report)
    if problems:
        raise StateMismatchError("optimizer state", problems)
    for one in fitted:
        one.apply()
    for fqn in saved.state:
        if fqn not in taken:
            report.dropped[f"{STATE}.{fqn}"] = "no optimizer here holds a parameter of this name"
    return report


def _with_names(
    state_dict: Mapping[str, Any], optimizers: Sequence[torch.optim.Optimizer], names: OptimizerNames
) -> Mapping[str, Any]:
    """Replace the indices of a plain `optimizer.state_dict()` by names."""
    groups = state_dict.get(GROUPS, [])
    if not any(isinstance(index, int) for group in groups for index in group.get(PARAMS, ())):
        return state_dict
    held = [group[PARAMS] for optimizer in optimizers for group in optimizer.param_groups]
    if [len(group[PARAMS]) for group in groups] != list(map(len, held)):
        raise StateMismatchError(
            "optimizer state",
            ["it has indices instead of names, and other groups than the optimizer; save it by names instead"],
        )
    fqns = {
        index: names.fqn(parameter, number, position)
        for number, (group, parameters) in enumerate(zip(groups, held, strict=True))
        for position, (index, parameter) in enumerate(zip(group[PARAMS], parameters, strict=True))
    }
    return {
        STATE: {fqns[index]: values for index, values in state_dict[STATE].items()},
        GROUPS: [{**group, PARAMS: [fqns[index] for index in group[PARAMS]]} for group in groups],
    }


def _broadcast(
    optimizers: Sequence[torch.optim.Optimizer], names: OptimizerNames, state_dict: Mapping[str, Any]
) -> SavedOptimizer:
    """Return rank 0's state, sharded like this rank's parameters; collective."""
    parameters = {
        names.fqn_of[parameter]: parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group[PARAMS]
        if parameter in names.fqn_of
    }

    def source() -> dict[str, Any]:
        if not state_dict:
            return {}
        mine = read_saved(_with_names(state_dict, optimizers, names), names.known)
        flat: dict[str, Any] = {
            f"{fqn}\0{name}": value for fqn, values in mine.state.items() for name, value in values.items()
        }
        flat[""] = (mine.hyperparameters, mine.empty_groups)
        return flat

    def target(key: str, sent: Any) -> torch.Tensor | None:
        fqn = key.partition("\0")[0]
        if names.owner is not None:  # which shards whole tensors itself
            return torch.empty(sent.shape, dtype=sent.dtype, device="cpu")
        parameter = next((parameters[name] for name in names.candidates(fqn) if name in parameters), None)
        if parameter is None:
            return None
        if parameter.shape == sent.shape and sent.shape:
            return torch.empty_like(parameter.detach(), dtype=sent.dtype)
        return torch.empty(sent.shape, dtype=sent.dtype, device="cpu")

    received = broadcast_tensors(source, target, lambda _header: ())()
    hyperparameters, empty_groups = received.pop("", ({}, []))
    saved = SavedOptimizer({}, hyperparameters, empty_groups)
    for key, value in received.items():
        fqn, _, name = key.partition("\0")
        saved.state.setdefault(fqn, {})[name] = value
    return saved


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load the optimizer state under a key of a checkpoint for an FSDP1 model, without an optimizer.

    State with the shape of a parameter in `model_state_dict` (FQN → tensor) is sharded like it.

    Returns:
        `{optimizer_key: state}`, nested like the saved state dict, with sharded tensors, whole tensors and objects.

    Raises:
        MissingKeyError: The checkpoint lacks values below `optimizer_key`.
        CheckpointException: One of several ranks failed; raised on all of them.

    Ranks: every rank of the default group; collective.
    Source: torch 2.13 `optimizer.load_sharded_optimizer_state_dict`.
    """
    storage_reader = adopted(storage_reader, StorageReader)
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    wanted = [
        name
        for name in metadata.state_dict_metadata
        if (paths[name][0] if name in paths else name.partition(".")[0]) == optimizer_key
    ]
    if not wanted:
        raise MissingKeyError(
            f"the checkpoint has nothing under {optimizer_key!r}; pass the key that it was saved under"
        )
    template = {name: _allocate(name, paths.get(name, ()), metadata, model_state_dict) for name in wanted}
    load(template, storage_reader=storage_reader, planner=planner or DefaultLoadPlanner())
    return dict(unflatten_state_dict(template, {name: paths[name] for name in wanted if name in paths}))


def _allocate(name: str, path: tuple[Any, ...], metadata: Metadata, model: Mapping[str, Any]) -> Any:
    stored = metadata.state_dict_metadata[name]
    if not isinstance(stored, TensorStorageMetadata):
        return None
    parameter = next((model[element] for element in path if element in model), None)
    dtype = stored.properties.dtype
    if parameter is not None and tuple(parameter.shape) == tuple(stored.size) and stored.size:
        # A copy has the sharding; its dtype may differ from that of the state.
        made = copy.deepcopy(parameter) if hasattr(parameter, "local_shards") else torch.empty_like(parameter)
        return made if made.dtype == dtype else made.to(dtype)
    return torch.empty(stored.size, dtype=dtype, device=group_device())
