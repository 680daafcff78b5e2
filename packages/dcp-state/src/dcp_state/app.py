"""The state of a whole training run: `app_state` as one `Stateful`, and `get_state_dict` and `set_state_dict`.

Saved names of `app_state` are `model.<FQN>`, `optimizer.state.<FQN>.<name>`, `optimizer.hyperparameters.<FQN>`,
`optimizer.groups` (hyperparameters of groups without parameters, in order), `schedulers`, and the names of further
values. Hyperparameters are saved per parameter, so a load may have other groups or pipeline stages.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict` (signatures and meanings of the two functions).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import WeakIdKeyDictionary

from dcp_base.logs import library_logger
from dcp_core import PerRank
from dcp_core.planning.replicas import value_bytes
from dcp_core.records.protocols import PartialState, in_shared_order, is_stateful, with_states
from dcp_core.storage.byte_storage import collector_paused
from dcp_state.base_model import BaseModel, FrozenValues, TrainableOnly, frozen_names, is_sharded, name_of_base
from dcp_state.canonical_names import ModelNames, name_model, name_models, optimizer_names
from dcp_state.model import fit_model, model_state
from dcp_state.optimizer.fitting import GROUPS, PARAM_NAMES, PARAMS, STATE, SavedOptimizer, is_bookkeeping, is_text
from dcp_state.optimizer.inner_optimizers import Optimizers, as_optimizers
from dcp_state.optimizer.optimizer_state_dict import initial_states, optimizer_state, restore_optimizers, restore_saved
from dcp_state.options import StateDictOptions, check_options
from dcp_state.random_state import RandomState
from dcp_state.report import IncompatibleKeys, StateMismatchError, StateReport, class_name, named_values, refusals
from dcp_state.sharding import named_tensors, on_all_ranks


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of `get_model_state_dict` and `get_optimizer_state_dict`, with their arguments.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `full_state_dict`.
    """
    options = check_options(options)
    with collector_paused():
        names = name_model(model, modifiers=options.dsd_fqn_modifiers)
        of_model = model_state(model, names, options, submodules)
        optimizers = as_optimizers(optimizers)
        of_optimizers = optimizer_state([(model, names)], optimizers, options, submodules) if optimizers else {}
    return of_model, of_optimizers


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load optimizer state as `set_optimizer_state_dict` does, then model state as `set_model_state_dict` does.

    With optimizers, an empty `model_state_dict` leaves the model unchanged. The result's `report` also has the
    optimizer state.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `broadcast_from_rank0`.
    """
    options = check_options(options)
    with collector_paused():
        names = on_all_ranks("model", lambda: name_model(model, modifiers=options.dsd_fqn_modifiers), options)
        optimizers = on_all_ranks("optimizers", lambda: as_optimizers(optimizers), options)
        load = fit_model(model, names, model_state_dict, options, may_be_empty=bool(optimizers))
        report = StateReport()
        if optimizers:
            report = restore_optimizers([(model, names)], optimizers, optim_state_dict, options)
        keys = load()
    keys.report.merge(report)
    return keys


_RESERVED = ("model", "optimizer", "schedulers")
_BASE = "base_model"  # reserved with `trainable_only`


def app_state(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizers | None = None,
    *,
    scheduler: Any = None,
    strict: bool = True,
    trainable_only: bool | TrainableOnly | None = None,
    **values: Any,
) -> AppState:
    """Combine the state of a training run in one value for `save` and `load`.

    Args:
        model: Model in any wrappers, or this rank's pipeline stages with the whole model's names.
        optimizer: One or several, or None.
        scheduler: One or several objects with `state_dict` and `load_state_dict`, or None.
        strict: Whether missing and unexpected names of model and optimizer are errors in a load.
        trainable_only: Whether parameters that are frozen, and have no optimizer state, are left out. A load keeps
            their values, and checks by digests that they are the saved values. `TrainableOnly` has options. None
            saves everything, and logs a warning if 90 % of the model is frozen.
        values: Further values by name: numbers and tensors, read after a load as `app["step"]`; `Stateful`s, restored
            in place; values that differ between ranks, in a `PerRank`; and `random=RandomState()`.

    Returns:
        A `Stateful`, which reads the state at each save.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: A value has a reserved name.

    Ranks: every rank that saves or loads; not collective. The result's methods are collective for FSDP1 models, and
        with `trainable_only` for sharded models and lists of stages.

    Example:
        ```python
        import torch
        from dcp_core import load, save
        from dcp_state import app_state

        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        save({"app": app_state(model, optimizer, step=100)}, checkpoint_id="step-100")
        app = app_state(model, optimizer, step=0)
        load({"app": app}, checkpoint_id="step-100")
        assert app["step"] == 100
        ```
    """
    parts = (model,) if isinstance(model, nn.Module) or not isinstance(model, Iterable) else tuple(model)
    single = isinstance(optimizer, torch.optim.Optimizer | nn.Module) or not isinstance(optimizer, Iterable)
    given: tuple[Any, ...] = (optimizer,) if single else tuple(cast(Iterable[Any], optimizer))
    several = isinstance(scheduler, Iterable) and not is_stateful(scheduler)
    schedulers = () if scheduler is None else tuple(scheduler) if several else (scheduler,)
    _check_arguments(parts, given, schedulers, strict, values)
    optimizers = () if optimizer is None else as_optimizers(given)
    if trainable_only:
        options = trainable_only if isinstance(trainable_only, TrainableOnly) else TrainableOnly()
        _check_names(values, _BASE)
        in_stages = not isinstance(model, nn.Module)
        return _TrainableState(
            parts, optimizers, schedulers, values, strict=strict, options=options, in_stages=in_stages
        )
    if trainable_only is None and optimizers:
        _warn_of_frozen(parts)
    return AppState(parts, optimizers, schedulers, values, strict=strict)


_log = library_logger(__name__)
_FROZEN_SHARE = 0.9
_warned: MutableMapping[nn.Module, bool] = cast(Any, WeakIdKeyDictionary())


def _warn_of_frozen(parts: Sequence[nn.Module]) -> None:
    """Log, once for a model, that most of what is saved never changes."""
    if not parts or parts[0] in _warned:
        return
    _warned[parts[0]] = True
    sizes = [(parameter.nbytes, parameter.requires_grad) for part in parts for parameter in part.parameters()]
    total, frozen = sum(size for size, _ in sizes), sum(size for size, trains in sizes if not trains)
    if total and frozen >= _FROZEN_SHARE * total:
        _log.warning(
            "%.0f %% of the model's bytes are frozen, and every checkpoint contains them: pass trainable_only=True to "
            "app_state to leave them out, or trainable_only=False to save them without this warning",
            100 * frozen / total,
        )


def _check_arguments(
    parts: Iterable[object],
    optimizers: Iterable[object],
    schedulers: Iterable[object],
    strict: object,
    values: Mapping[str, object],
) -> None:
    optional = "a torch.optim.Optimizer, a list of them, or None"
    wrong = [
        *(("model", each, "an nn.Module, or a list of them") for each in parts if not isinstance(each, nn.Module)),
        *(("optimizer", each, optional) for each in optimizers if isinstance(each, nn.Module | LRScheduler)),
        *(
            ("scheduler", each, "an object with state_dict and load_state_dict, a list of them, or None")
            for each in schedulers
            if not is_stateful(each) or isinstance(each, nn.Module | torch.optim.Optimizer)
        ),
        *([] if isinstance(strict, bool) else [("strict", strict, "True or False")]),
    ]
    for name, each, wanted in wrong:
        raise TypeError(
            f"{name} is {wanted}, not an object of class {type(each).__name__}; call "
            "app_state(model, optimizer, scheduler=scheduler, step=step)"
        )
    if any(isinstance(value, StateDictOptions) for value in values.values()):
        raise TypeError(
            "app_state takes no StateDictOptions: it saves shards, and has strict= itself; for other options, call "
            "get_state_dict(model, optimizer, options=…)"
        )
    _check_names(values, *_RESERVED)


def _check_names(values: Mapping[str, object], *reserved: str) -> None:
    taken = [name for name in values if name in reserved]
    if taken:
        raise ValueError(f"{', '.join(map(repr, taken))}: these names are taken by app_state itself; choose others")


class AppState:
    """Result of `app_state`.

    `app["name"]` is the further value of that name; `report` is the `StateReport` of the last load.

    Example:
        ```python
        import torch
        from dcp_core import load, save
        from dcp_state.app import AppState, app_state

        model = torch.nn.Linear(4, 2)
        app: AppState = app_state(model, step=100)
        save({"app": app}, checkpoint_id="step-100")
        load({"app": app}, checkpoint_id="step-100")
        print(app["step"], app.report)
        ```
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[Any],
        values: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        self.report = StateReport()
        self._parts = tuple(parts)
        self._optimizers = tuple(optimizers)
        self._schedulers = tuple(schedulers)
        # Restored on all ranks, the random state of one rank would make all of them draw the same numbers.
        self._wrapped = {name: PerRank(value) for name, value in values.items() if isinstance(value, RandomState)}
        self._values = {**values, **self._wrapped}
        self._options = StateDictOptions(strict=strict)
        self._given = WeakIdKeyDictionary()

    def __getitem__(self, name: str) -> Any:
        return self._wrapped[name].value if name in self._wrapped else self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def state_dict(self) -> dict[str, Any]:
        """Return the state on this rank; tensors share the memory of model and optimizers."""
        with collector_paused():
            state = self._run_state(self._names())
        if self._schedulers:
            state["schedulers"] = tuple(scheduler.state_dict() for scheduler in self._schedulers)
        return {**state, **with_states(self._values)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the training run; StateMismatchError has every reason why the state dict does not fit."""
        self.report = StateReport()
        absent = state_dict.absent if isinstance(state_dict, PartialState) else []
        with collector_paused():
            names = self._names()
            kept = self._check(names, state_dict)
            loads = self._fit_models(names, state_dict, kept)
            if self._optimizers:
                self._restore_optimizers(names, state_dict.get("optimizer", {}), absent)
            for load in loads:
                self.report.merge(load().report)
        for name in kept:
            self.report.initialised.pop(f"{GROUPS}.{name}", None)
        for scheduler, state in zip(self._schedulers, state_dict.get("schedulers", ()), strict=True):
            with refusals("schedulers", f"{class_name(scheduler)}.load_state_dict"):
                scheduler.load_state_dict(state)
        for name, value in in_shared_order(self._values):
            self._restore_value(name, value, state_dict)
        for path in absent:
            name = _reported_name(path)
            if name in self.report.restored:
                self.report.restored.remove(name)
            self.report.initialised[name] = "not in the checkpoint"

    def _run_state(self, names: Sequence[ModelNames]) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._model_states(names)}
        if self._optimizers:
            state["optimizer"] = self._optimizer_state(names)
        return state

    def _model_states(self, names: Sequence[ModelNames]) -> dict[str, Any]:
        models: dict[str, Any] = {}
        for part, of_part in zip(self._parts, names, strict=True):
            models.update(model_state(part, of_part, self._options))
        return models

    def _names(self) -> list[ModelNames]:
        return name_models(self._parts, modifiers=self._options.dsd_fqn_modifiers)

    def _optimizer_state(self, names: Sequence[ModelNames]) -> dict[str, Any]:
        named = optimizer_state(list(zip(self._parts, names, strict=True)), self._optimizers, self._options)
        for _, tensor in named_tensors(named[STATE]):
            self._given[tensor] = True
        hyperparameters: dict[str, Any] = {}
        groups = []
        defaults = {name for optimizer in self._optimizers for name in optimizer.defaults}
        for group in named[GROUPS]:
            entries = sorted((name, value) for name, value in group.items() if name not in (PARAMS, PARAM_NAMES))
            hyperparameters.update(dict.fromkeys(group[PARAMS], tuple(entries)))
            # Pipeline stages give their groups names of their own: the rest is the same on all ranks.
            shared = (
                (name, value)
                for name, value in entries
                if not (is_text(value) or is_bookkeeping(name, value, defaults=defaults))
            )
            groups.append(tuple(shared))
        return {STATE: named[STATE], "hyperparameters": hyperparameters, "groups": tuple(groups)}

    def _restore_optimizers(
        self, names: Sequence[ModelNames], state: Mapping[str, Any], absent: Sequence[tuple[Any, ...]]
    ) -> None:
        unpacked: dict[Any, dict[str, Any]] = {}
        hyperparameters: dict[str, Mapping[str, Any]] = {}
        for fqn, packed in state.get("hyperparameters", {}).items():
            key = _telling(packed)
            if key not in unpacked:
                unpacked[key] = _unpacked(packed, repr(fqn))
            hyperparameters[fqn] = unpacked[key]
        # Parameters that were frozen at the save take the hyperparameters of their group.
        unsaved = frozenset(path[2] for path in absent if path[:2] == ("optimizer", "hyperparameters"))
        for fqn in unsaved:
            hyperparameters.pop(fqn, None)
        with refusals("optimizer state", "list of groups"):
            groups = list(state.get("groups", ()))
        mine = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        empty = [number for number, group in enumerate(mine) if not group[PARAMS]]
        of_empty: list[Mapping[str, Any]] = [
            _unpacked(groups[number], f"group {number}") if number < len(groups) else {} for number in empty
        ]
        saved = SavedOptimizer(state.get(STATE, {}), hyperparameters, of_empty, unsaved)
        adopt = all(tensor in self._given for _, tensor in named_tensors(saved.state))
        joined = optimizer_names(list(zip(self._parts, names, strict=True)))
        self.report.merge(restore_saved(initial_states(self._optimizers), joined, saved, self._options, adopt=adopt))

    def _check(self, names: Sequence[ModelNames], state: Mapping[str, Any]) -> Collection[str]:
        del names  # of the model, of which those that stay as they are would be returned
        optimizer = named_values(state.get("optimizer", {}) if self._optimizers else {}, "optimizer state")
        for part in (STATE, "hyperparameters"):
            named_values(optimizer.get(part, {}), "optimizer state", part)
        with refusals("schedulers", "list"):
            saved, present = len(list(state.get("schedulers", ()))), len(self._schedulers)
        if saved != present:
            raise StateMismatchError("schedulers", [f"{saved} were saved, there are {present}; pass as many as then"])
        return ()

    def _fit_models(
        self, names: Sequence[ModelNames], state: Mapping[str, Any], kept: Collection[str]
    ) -> list[Callable[[], IncompatibleKeys]]:
        loads = []
        for part, of_part in zip(self._parts, names, strict=True):
            mine = named_values(state.get("model"), "model state")
            if len(self._parts) > 1:
                mine = {name: value for name, value in mine.items() if name in of_part.raw_keys}
            if mine or of_part.raw_keys:
                loads.append(fit_model(part, of_part, mine, self._options, kept=kept))
        return loads

    def _restore_value(self, name: str, value: Any, state: Mapping[str, Any]) -> None:
        if isinstance(value, PerRank):
            _take_own(value, state.get(name, value))
        elif is_stateful(value):
            value.load_state_dict(state.get(name, {}))
        elif name in state:
            self._values[name] = state[name]
        else:
            self.report.initialised[name] = "not in the state dict"


_FROZEN: MutableMapping[nn.Module, FrozenValues] = cast(Any, WeakIdKeyDictionary())
"""Model → its frozen values' digests, which outlive an `app_state` per save."""


class _TrainableState(AppState):
    """Result of `app_state` with `trainable_only`: `base_model` describes the frozen parameters."""

    def __init__(self, *arguments: Any, options: TrainableOnly, in_stages: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._only = options
        self._in_stages = in_stages
        self._frozen_values = _FROZEN.setdefault(self._parts[0], FrozenValues()) if self._parts else FrozenValues()

    def _run_state(self, names: Sequence[ModelNames]) -> dict[str, Any]:
        state = super()._run_state(names)
        frozen, base = self._find_base(names, state)
        left_out = self._left_out(names, frozen)
        state["model"] = {name: value for name, value in state["model"].items() if name not in left_out}
        if self._optimizers:
            of_groups = state["optimizer"]["hyperparameters"]
            state["optimizer"]["hyperparameters"] = {
                name: value for name, value in of_groups.items() if name not in frozen
            }
        return {**state, _BASE: base.as_text()}

    def _find_base(self, names: Sequence[ModelNames], state: Mapping[str, Any]) -> tuple[set[str], BaseModel]:
        """Return the frozen names and the base; collective for sharded models and stages."""
        frozen = {name for part in names for name in frozen_names(part)}
        aliases = {alias: first for part in names for alias, first in part.aliases.items()}
        stepped = state.get("optimizer", {}).get(STATE, {})
        trained = {name for name in frozen if aliases.get(name, name) in stepped}
        together = self._in_stages or any(is_sharded(state["model"][name]) for name in frozen)
        frozen, stale = self._frozen_values.agree(frozen, trained, state["model"], names, together=together)
        tensors = None
        if self._only.digest:
            if stale:
                self._frozen_values.compute(frozen, state["model"], names, together=together)
            tensors = self._frozen_values.table
        found = self._only.base or next(filter(None, map(name_of_base, self._parts)), None)
        return frozen, BaseModel(found, tensors)

    def _restore_optimizers(
        self, names: Sequence[ModelNames], state: Mapping[str, Any], absent: Sequence[tuple[Any, ...]]
    ) -> None:
        frozen = {name for part in names for name in frozen_names(part)} - state.get("hyperparameters", {}).keys()
        super()._restore_optimizers(
            names, state, [*absent, *(("optimizer", "hyperparameters", name) for name in frozen)]
        )

    def _left_out(self, names: Sequence[ModelNames], frozen: set[str]) -> set[str]:
        if self._only.buffers:
            return frozen
        tensors = [each for part in names for each in part.tensors.items()]
        return frozen | {name for name, tensor in tensors if not isinstance(tensor, nn.Parameter)}

    def _check(self, names: Sequence[ModelNames], state: Mapping[str, Any]) -> Collection[str]:
        kept = super()._check(names, state)
        if any(adapter.gathers for part in names for adapter in part.adapters):
            self._frozen_values.forget()
        frozen, found = self._find_base(names, {**state, "model": self._model_states(names)})
        known = None if self._in_stages else {name for part in names for name in part.raw_keys}
        BaseModel.from_text(state.get(_BASE)).check(found, known, strict=self._options.strict)
        return self._left_out(names, frozen).union(kept)


def _reported_name(path: Sequence[Any]) -> str:
    if path[:2] == ("optimizer", "hyperparameters"):
        return f"{GROUPS}.{path[2]}"
    if path[0] == "optimizer":
        return ".".join(map(str, path[1:3]))
    return str(path[1] if path[0] == "model" else path[0])


def _take_own(value: PerRank, other: Any) -> None:
    """Restore this rank's value, unless `load` has filled it in place."""
    if other is value:
        return
    state = other.value if isinstance(other, PerRank) else other
    if is_stateful(value.value):
        value.value.load_state_dict(state.state_dict() if is_stateful(state) else state)
    else:
        value.value = state


def _unpacked(packed: Any, of: str) -> dict[str, Any]:
    """Return hyperparameters that were saved as pairs."""
    with refusals("hyperparameters", f"dict of {of}"):
        return dict(named_values(dict(packed), "hyperparameters", of))


def _telling(packed: Any) -> Hashable:
    """Return a cache key that, unlike `repr`, is equal only for bitwise equal hyperparameters."""
    try:
        return value_bytes(packed)
    except Exception:  # noqa: BLE001 - what cannot be pickled is equal to itself alone
        return id(packed)
