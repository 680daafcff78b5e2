"""Model state dicts under canonical names: get and set.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict` (signatures, meanings).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.load_report import suggest
from dcp_core.storage.byte_storage import collector_paused
from dcp_core.tensors.kinds import as_dtensor, is_dtensor
from dcp_state.canonical_names import ModelNames, name_model
from dcp_state.options import StateDictOptions, check_options
from dcp_state.report import IncompatibleKeys, StateMismatchError, StateReport, named_values
from dcp_state.sharding import broadcast_model, convert_tensors, on_all_ranks, place


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of a model by canonical names, the same for every wrapper and parallelism.

    Args:
        model: Model in any nesting of DDP, FSDP1, FSDP2, tensor parallel, compiled and checkpointed wrappers.
        submodules: Modules to limit the state to; None for all (deprecated).
        options: None for the defaults.

    Returns:
        FQN → parameter, persistent buffer or extra state. Tensors share the model's memory; sharded ones are DTensors.
        A tied parameter has an entry for each of its names.

    Raises:
        UnsupportedValueError: Two tensors have the same canonical name.
        CheckpointException: With `full_state_dict`, a rank failed; raised on all ranks.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `full_state_dict`.
    """
    options = check_options(options)
    with collector_paused():
        names = name_model(model, modifiers=options.dsd_fqn_modifiers)
        return model_state(model, names, options, submodules)


def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> IncompatibleKeys:
    """Load a state dict of `get_model_state_dict` into a model, which may have other wrappers and parallelism.

    Tensors are copied into the model, except that a model on the meta device takes the tensors themselves. Deprecated,
    as in stock: submodule → its state dict.

    Returns:
        Missing and unexpected names, and a `StateReport`.

    Raises:
        StateMismatchError: Names are missing or unexpected (with `strict`), shapes differ, or the state dict is empty.
        CheckpointException: With `broadcast_from_rank0`, a rank failed; raised on all ranks.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `broadcast_from_rank0`.
    """
    options = check_options(options)
    with collector_paused():
        names = on_all_ranks("model", lambda: name_model(model, modifiers=options.dsd_fqn_modifiers), options)
        return fit_model(model, names, model_state_dict, options)()


def model_state(
    model: nn.Module, names: ModelNames, options: StateDictOptions, submodules: set[nn.Module] | None = None
) -> dict[str, Any]:
    """See `get_model_state_dict`; for a model with known names."""
    _refuse_hidden_parameters(model)
    with _around(model, names, options):
        raw = model.state_dict()
    state = {names.fqn(key): value for key, value in raw.items()}
    state |= {name: as_dtensor(tensor) for name, tensor in names.tensors.items() if name in state and _is_part(tensor)}
    if options.ignore_frozen_params:
        named = names.tensors.items()
        frozen = {name for name, each in named if isinstance(each, nn.Parameter) and not each.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    state = take_submodules(state, submodule_prefixes(names, submodules), keep=options.keep_submodule_prefixes)
    return convert_tensors(state, options)


def fit_model(
    model: nn.Module,
    names: ModelNames,
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
    *,
    may_be_empty: bool = False,
    kept: Collection[str] = (),
) -> Callable[[], IncompatibleKeys]:
    """See `set_model_state_dict`; for a model with known names. Returns the load. The names `kept` may be missing."""
    state_dict = on_all_ranks("model state", lambda: named_values(_by_names(state_dict, names), "model state"), options)
    nothing = IncompatibleKeys.of([], [], StateReport())
    if options.broadcast_from_rank0:
        plain = not any(adapter.gathers for adapter in names.adapters)
        known = {name: as_dtensor(tensor) for name, tensor in names.tensors.items()} if plain else {}
        checks = plain and options.strict and _can_load_directly(model, names)

        def problems(sent: Collection[str]) -> Iterable[str]:
            return _problems(*_differing(names, sent), names) if checks and sent else ()

        fill = broadcast_model(known, state_dict, problems, may_be_empty=may_be_empty)

        def load() -> IncompatibleKeys:
            left, done = fill()
            if may_be_empty and not left and not done:
                return nothing
            fitted = on_all_ranks("fit", lambda: _fit(model, names, left, options, done), options)
            return on_all_ranks("load", fitted, options)

        return load
    if not (state_dict or may_be_empty or kept or options.ignore_frozen_params) and options.strict:
        raise StateMismatchError(
            "model state", ["the state dict is empty; pass what get_model_state_dict gave, or strict=False"]
        )
    return _fit(model, names, state_dict, options, (), kept) if state_dict or kept else lambda: nothing


def _fit(
    model: nn.Module,
    names: ModelNames,
    state_dict: Mapping[str, Any],
    options: StateDictOptions,
    done: Collection[str],
    kept: Collection[str] = (),
) -> Callable[[], IncompatibleKeys]:
    meta = any(tensor.is_meta for tensor in names.tensors.values())
    plain = not any(adapter.gathers for adapter in names.adapters)
    if kept and not plain:  # FSDP1 loads whole units only
        whole = model_state(model, names, options)
        state_dict = {**{name: value for name, value in whole.items() if name in kept}, **state_dict}
    values = {
        name: _placed(name, value, names.tensors.get(name)) if plain else value for name, value in state_dict.items()
    }
    direct = plain and _can_load_directly(model, names)
    if direct:
        _check_values(names, values, {*done, *kept} if options.strict else None)

    def load() -> IncompatibleKeys:
        if direct:
            missing, unexpected = _differing(names, values)
            _load_directly(names, values)
        else:
            with _around(model, names, options):
                keys = _load(model, {names.raw_key(name): value for name, value in values.items()}, assign=meta)
            missing, unexpected = [*map(names.fqn, keys.missing_keys)], [*map(names.fqn, keys.unexpected_keys)]
        missing = [name for name in missing if name not in done and name not in kept]
        if options.strict and (missing or unexpected):
            raise StateMismatchError("model state", list(_problems(missing, unexpected, names)))
        refused = set(unexpected)
        taken = [name for name in [*done, *state_dict] if name not in refused and name not in kept]
        report = StateReport(
            sorted(taken),
            dict.fromkeys(missing, "not in the state dict; kept as it was"),
            dict.fromkeys(unexpected, "the model has nothing of this name"),
        )
        return IncompatibleKeys.of(missing, unexpected, report)

    return load


def _is_part(tensor: torch.Tensor | None) -> bool:
    """Return whether a parameter is a DTensor's local tensor: tensor parallelism in DDP."""
    return tensor is not None and "_st_info" in tensor.__dict__


def _placed(name: str, value: Any, like: torch.Tensor | None) -> Any:
    if like is None or not _is_part(like):
        return place(name, value, like)
    placed = place(name, value, as_dtensor(like))
    return placed.to_local() if is_dtensor(placed) else placed


def _refuse_hidden_parameters(model: nn.Module) -> None:
    """Raise if the first forward replaced parameters by plain attributes, as tensor parallelism in DDP does."""
    hooks = "torch.distributed.tensor.parallel.ddp"
    if hooks not in sys.modules:
        return
    for module in model.modules():
        if not any(getattr(hook, "__module__", "") == hooks for hook in module._forward_pre_hooks.values()):  # noqa: SLF001
            continue
        for prefix, inner in module.named_modules():
            for name, value in vars(inner).items():
                if is_dtensor(value):
                    raise UnsupportedValueError(
                        f"{f'{prefix}.{name}'.lstrip('.')!r} is an attribute since the first forward, and no longer a "
                        "parameter, so no state dict has it: torch's hooks for tensor parallelism in DDP do so. Use "
                        "fully_shard in place of DDP"
                    )


def _by_names(state_dict: Any, names: ModelNames) -> Any:
    if not isinstance(state_dict, Mapping) or not any(isinstance(key, nn.Module) for key in state_dict):
        return state_dict
    warnings.warn(
        "Passing model_state_dict as a dict with modules as keys is deprecated: put each submodule's name before its "
        "names instead",
        FutureWarning,
        stacklevel=4,
    )
    named: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(key, nn.Module):
            named[key] = value
            continue
        for prefix in names.module_prefixes.get(key, [f"<a {type(key).__name__} that the model does not hold>."]):
            named.update({prefix + name: each for name, each in value.items()})
    return named


def _load(model: nn.Module, values: dict[str, Any], *, assign: bool) -> Any:
    try:
        return model.load_state_dict(values, strict=False, assign=assign)
    except RuntimeError as error:
        raise StateMismatchError("model state", str(error).splitlines()[1:] or [str(error)]) from error


def _problems(missing: Iterable[str], unexpected: Iterable[str], names: ModelNames) -> Iterator[str]:
    unexpected = list(unexpected)
    for name in missing:
        yield f"Missing key {name!r} in the state dict{suggest(name, unexpected)}"
    for name in unexpected:
        yield f"Unexpected key {name!r}: the model has nothing of this name{suggest(name, names.raw_keys)}"


def submodule_prefixes(names: ModelNames, submodules: set[nn.Module] | None) -> list[str] | None:
    """Return submodules' FQN prefixes; None for the whole model."""
    if not submodules:
        return None
    warnings.warn(
        "Getting submodules only model/optim state_dict is deprecated: filter the state dict by name instead",
        FutureWarning,
        stacklevel=4,
    )
    return [prefix for module in submodules for prefix in names.module_prefixes.get(module, [])]


def take_submodules(state: dict[str, Any], prefixes: list[str] | None, *, keep: bool) -> dict[str, Any]:
    """Return the values below `prefixes` (None: all); without `keep`, cut the prefix off."""
    if prefixes is None:
        return state
    return {
        name if keep else name[len(prefix) :]: value
        for name, value in state.items()
        for prefix in prefixes
        if name.startswith(prefix)
    }


@contextlib.contextmanager
def _around(model: nn.Module, names: ModelNames, options: StateDictOptions) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for adapter in names.adapters:
            stack.enter_context(adapter.around(model, options))
        yield


def _can_load_directly(model: nn.Module, names: ModelNames) -> bool:
    """Return whether there are no load hooks, overrides or meta tensors."""
    if len(names.tensors) != len(names.raw_keys) or any(tensor.is_meta for tensor in names.tensors.values()):
        return False
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return False
    return not any(map(_takes_part, names.module_prefixes))


def _takes_part(module: nn.Module) -> bool:
    known = (nn.Module._load_from_state_dict, _BatchNorm._load_from_state_dict)  # noqa: SLF001 - torch's way
    own = type(module)._load_from_state_dict not in known  # noqa: SLF001 - as above
    return own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)  # noqa: SLF001 - as above


def _differing(names: ModelNames, values: Collection[str]) -> tuple[list[str], list[str]]:
    # Old state dicts lack the counters of batches: torch keeps them as they are.
    counters = {
        f"{prefix}num_batches_tracked"
        for module, prefixes in names.module_prefixes.items()
        for prefix in prefixes
        if isinstance(module, _BatchNorm)
    }
    missing = [name for name in names.tensors if name not in values and name not in counters]
    return missing, [name for name in values if name not in names.tensors]


def _check_values(names: ModelNames, values: Mapping[str, Any], may_lack: Collection[str] | None) -> None:
    missing, unexpected = _differing(names, values)
    problems: list[str] = []
    if may_lack is not None:
        problems += _problems([name for name in missing if name not in may_lack], unexpected, names)
    for name, tensor in names.tensors.items():
        value = values.get(name, tensor)
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name!r} is a {type(value).__name__}; the model needs a tensor")
        elif value.shape != tensor.shape:
            problems.append(
                f"size mismatch for {name!r}: {tuple(value.shape)} here, {tuple(tensor.shape)} in the model"
            )
    if problems:
        raise StateMismatchError("model state", problems)


@torch.no_grad()
def _load_directly(names: ModelNames, values: Mapping[str, Any]) -> None:
    for name, tensor in names.tensors.items():
        if name in values:
            tensor.copy_(values[name])
