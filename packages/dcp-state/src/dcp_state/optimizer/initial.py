"""Initial state of a parameter that was never stepped, found by a trial step on a stand-in optimizer.

Templates of loads need it. Stock takes a real step with lr=0 instead, which sets step counters to 1 and runs hooks.

Method: the stand-in has the optimizer's class, copies of its plain data, and a trial parameter; it lacks hooks,
replaced methods and data that cannot be copied. It steps with a parameter and a gradient of zeros, and the first value
under each name of the state is recorded. A second trial with another gradient finds names that zeros do not create.
Trials with another parameter find state that depends on the parameter's numbers, such as a copy of the weights: it
needs a trial for each parameter. The optimizers of `torch.optim` make their state before the update, from shapes and
dtypes alone: one trial that ends there finds the state of a whole group.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from dcp_core.errors import UnsupportedValueError
from dcp_core.tensors.kinds import dtensor_layout, is_dtensor
from dcp_state.adapters import OptimizerAdapter
from dcp_state.optimizer.copying import IsolatedCopies, copy_value, same_value
from dcp_state.optimizer.inner_optimizers import holds_its_own_state
from dcp_state.random_state import random_state_kept
from dcp_state.report import class_name, nameless_state

_HOOKS_LOCK = threading.Lock()


class _StopHereError(Exception):
    """Stops a trial step where the update would begin."""


class Recorded(dict[str, Any]):
    """State dict of the trial parameter, which records first values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, copy_value(value))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Record a default."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Record the values."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> Recorded:  # type: ignore[override,misc]
        self.update(other)
        return self

    def initial(self) -> dict[str, Any]:
        """Return name → first recorded value."""
        return {name: _before(name, self.first[name], value) for name, value in self.items()}


def _before(name: str, first: Any, last: Any) -> Any:
    if not _alike(first, last):
        return last
    if name == "step" and _is_number(first) and float(first) == float(last) != 0:
        return first - first  # made and counted at once
    return first


def _alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return bool(one.shape == other.shape and one.dtype == other.dtype)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(_alike, one, other))
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


class _StandInState(defaultdict[Any, Any]):
    def __init__(self) -> None:
        super().__init__(Recorded)

    def __setitem__(self, key: Any, value: Any) -> None:
        plain = isinstance(value, dict) and not isinstance(value, Recorded)
        super().__setitem__(key, Recorded(value) if plain else value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]


@contextlib.contextmanager
def make_stand_in(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], *parameters: torch.Tensor
) -> Iterator[tuple[torch.optim.Optimizer, list[str]]]:
    """Make a stand-in that trains the trial parameters (at least one) with the hyperparameters of `group`.

    No code of the optimizer's class is called. At the end, the stand-in's attributes are cleared, because references to
    itself would keep its tensors. UnsupportedValueError: `param_groups` and `state` are properties, so they may
    belong to another object.
    """
    kind = type(optimizer)
    if not holds_its_own_state(optimizer):
        raise UnsupportedValueError(f"{class_name(optimizer)} shows groups and state that are not its own")
    stand_in: torch.optim.Optimizer = object.__new__(kind)
    known: list[tuple[Any, Any]] = [(optimizer, stand_in)]
    known += [(each, parameters[0]) for every in optimizer.param_groups for each in every["params"]]
    copies = IsolatedCopies(known)
    missing: list[str] = []
    attributes = vars(stand_in)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            attributes[name] = OrderedDict()
        elif name not in ("param_groups", "state") and not callable(getattr(kind, name, None)):
            _copy_into(attributes, name, value, copies, missing)
    _shadow_class_attributes(kind, attributes, copies)
    own: dict[str, Any] = {}
    for name, value in group.items():
        if name != "params":
            _copy_into(own, name, value, copies, missing)
    for each in (own, attributes.get("defaults", {})):
        if "differentiable" in each:  # a trial parameter is a leaf, and what state there is does not depend on it
            each["differentiable"] = False
    attributes["param_groups"] = [{**own, "params": [*parameters]}]
    attributes["state"] = _StandInState()
    try:
        yield stand_in, missing
    finally:
        attributes.clear()


def _copy_into(into: dict[str, Any], name: str, value: Any, copies: IsolatedCopies, missing: list[str]) -> None:
    try:
        into[name] = copies.copy(value)
    except TypeError:
        missing.append(f"{name!r}, a {type(value).__name__}")


def _shadow_class_attributes(kind: type, attributes: dict[str, Any], copies: IsolatedCopies) -> None:
    """Copy the mutable class attributes that the stand-in's step could change."""
    for each in kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]:
        for name, value in vars(each).items():
            changeable = isinstance(value, dict | list | set | deque | torch.Tensor) and not name.startswith("__")
            if changeable and name not in attributes:
                try:
                    attributes[name] = copies.copy(value)
                except TypeError:
                    raise UnsupportedValueError(
                        f"the class attribute {name!r} of {each.__qualname__} holds a value that cannot be copied"
                    ) from None


def step_stand_in(
    stand_in: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, only_prepare: bool = False
) -> None:
    """Take one step of a stand-in without side effects on random generators, hooks and modes.

    A step of a torch class ends when state is made, before the update; with `only_prepare`, which requires
    `prepares_state`, even if none was made.
    """
    function = _step_of(type(stand_in))
    trial = stand_in.param_groups[0]["params"][0]
    with contextlib.ExitStack() as stack:
        if prepares_state(stand_in):
            vars(stand_in)["_init_group"] = _stopping(stand_in, always=only_prepare)
        stack.enter_context(random_state_kept(trial.device))
        stack.enter_context(_no_global_hooks())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.autocast(trial.device.type, enabled=False))
        stack.enter_context(contextlib.suppress(_StopHereError))
        function(stand_in) if closure is None else function(stand_in, closure)


def prepares_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` is torch's implementation and makes all state before the first update."""
    return _is_of_torch(_step_of(type(optimizer)), type(optimizer))


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's `step` without the decorator that runs hooks."""
    function: Any = kind.step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def _is_of_torch(step: Callable[..., Any], kind: type[torch.optim.Optimizer]) -> bool:
    makes_state: Any = getattr(kind, "_init_group", None)
    return step.__module__.startswith("torch.optim.") and getattr(makes_state, "__module__", "") == step.__module__


def _stopping(stand_in: Any, *, always: bool) -> Callable[..., Any]:
    def initialise(*args: Any, **kwargs: Any) -> Any:
        result = type(stand_in)._init_group(stand_in, *args, **kwargs)  # noqa: SLF001 - where torch makes state
        if always or any(stand_in.state.values()):
            raise _StopHereError
        return result

    return initialise


@contextlib.contextmanager
def _no_global_hooks() -> Iterator[None]:
    """Disable hooks for all optimizers: a step may call a base class's step, which runs them."""
    registries: list[Any] = [
        torch_optimizer._global_optimizer_pre_hooks,  # noqa: SLF001 - there is no public way
        torch_optimizer._global_optimizer_post_hooks,  # noqa: SLF001 - as above
    ]
    with _HOOKS_LOCK:
        kept = [dict(each) for each in registries]
        for each in registries:
            each.clear()
        try:
            yield
        finally:
            for each, hooks in zip(registries, kept, strict=True):
                each.update(hooks)


_OTHER_VALUE = 0.375  # exact in every floating dtype of at least four bits
_WEIGHT_DECAY = "weight_decay"
_STATE = "state"
Fill = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Known:
    state: dict[str, Any]
    counted: frozenset[str] = frozenset()
    """Names whose values a step with a gradient changes."""
    by_value: frozenset[str] = frozenset()
    """Names whose values depend on the values of the parameter."""


class InitialStates:
    """Initial states of one optimizer's parameters. The adapter is asked before a trial step."""

    def __init__(self, optimizer: torch.optim.Optimizer, adapter: OptimizerAdapter | None) -> None:
        self.optimizer = optimizer
        self._adapter = adapter
        self._known: dict[Hashable, _Known] = {}
        self._value_free: dict[int, bool] = {}

    @torch.inference_mode(mode=False)  # the tensors are trained with later
    def of(self, group_index: int, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the initial state per parameter, in new tensors, or raise UnsupportedValueError."""
        is_packed = type(self.optimizer).state_dict is not torch.optim.Optimizer.state_dict
        if parameters and self._adapter is None and not is_packed and self._is_value_free(group_index, parameters[0]):
            made = self._prepared(self.optimizer.param_groups[group_index], parameters)
            if made:  # without a copy, which would take as long as reading the state from a file
                return made
        return [self._of_one(group_index, parameter) for parameter in parameters]

    def _of_one(self, group_index: int, parameter: torch.Tensor) -> dict[str, Any]:
        named = self._of_adapter(group_index, parameter)
        if named is not None:
            return named
        known = self._of_kind(group_index, parameter)
        if known.by_value:
            group = _without_decay(self.optimizer.param_groups[group_index])
            probed = self._probe(group, parameter, lambda trial: trial.copy_(parameter.detach()))
            return self._packed(group, parameter, probed).state
        return {name: copy_value(value) for name, value in known.state.items()}

    def like(self, group_index: int, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        """Return read-only state with the initial names, shapes and dtypes; None if the trial step fails."""
        named = self._of_adapter(group_index, parameter)
        if named is not None:
            return named
        try:
            return self._of_kind(group_index, parameter).state
        except UnsupportedValueError:
            return None

    def prepare(self) -> None:
        """Cache initial states, where trial steps succeed."""
        for number, group in enumerate(self.optimizer.param_groups):
            for parameter in group["params"]:
                self.like(number, parameter)

    def is_untouched(self, group_index: int, parameter: torch.Tensor, values: Mapping[str, Any]) -> bool:
        """Return whether a parameter's state equals its initial state: the optimizer took no step for it.

        It must not be loaded if the optimizer makes state from the first gradient, or treats parameters without state
        differently.
        """
        if self._of_adapter(group_index, parameter) is not None or self._is_value_free(group_index, parameter):
            return False
        if not self.like(group_index, parameter):
            return False
        known = self._of_kind(group_index, parameter)
        size = partial(_size, known.state)
        fixed = sorted(known.state.keys() - known.by_value, key=size)
        return (
            not known.counted.isdisjoint(fixed)
            and values.keys() == known.state.keys()
            and all(same_value(known.state[name], values[name]) for name in fixed)
        )

    def _of_adapter(self, group_index: int, parameter: torch.Tensor) -> dict[str, Any] | None:
        if self._adapter is None:
            return None
        return self._adapter.initial_state(self.optimizer, self.optimizer.param_groups[group_index], parameter)

    @torch.inference_mode(mode=False)
    def _of_kind(self, group_index: int, parameter: torch.Tensor) -> _Known:
        kind = (group_index, _kind(parameter))
        if kind not in self._known:
            group = self.optimizer.param_groups[group_index]
            made = self._prepared(group, [parameter]) if self._is_value_free(group_index, parameter) else []
            found = _Known(made[0]) if made else self._find(group, parameter)
            self._known[kind] = self._packed(group, parameter, found)
        return self._known[kind]

    def _is_value_free(self, group_index: int, parameter: torch.Tensor) -> bool:
        """Return whether initial state depends on hyperparameters, shapes and dtypes alone."""
        if group_index not in self._value_free:
            small = torch.zeros((1, 1), dtype=parameter.dtype, device=parameter.device)
            group = self.optimizer.param_groups[group_index]
            self._value_free[group_index] = prepares_state(self.optimizer) and any(self._prepared(group, [small]))
        return self._value_free[group_index]

    def _prepared(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the state that torch makes before any update; trial parameters share the memory of parameters."""
        try:
            trials = [parameter.detach().requires_grad_() for parameter in parameters]
            for trial in trials:
                trial.grad = trial.detach()
            with make_stand_in(self.optimizer, group, *trials) as (stand_in, _):
                stand_in.state = defaultdict(dict)
                step_stand_in(stand_in, None, only_prepare=True)
                return [stand_in.state[trial] for trial in trials]
        except Exception:  # noqa: BLE001 - foreign code on a stand-in, which is tried in other ways
            return []

    def _packed(self, group: Mapping[str, Any], parameter: torch.Tensor, known: _Known) -> _Known:
        """Convert state to the form of `state_dict()`, where some classes rename or nest it."""
        kind: Any = type(self.optimizer)
        if kind.state_dict is torch.optim.Optimizer.state_dict or not known.state:
            return known
        trial = _trial(parameter, torch.Tensor.zero_, 0.0, sparse=False)
        try:
            with make_stand_in(self.optimizer, group, trial) as (stand_in, _):
                stand_in.state[trial] = dict(known.state)
                packed = dict(kind.state_dict(stand_in)[_STATE][0])
        except Exception:  # noqa: BLE001 - foreign code on a stand-in
            return known
        moved, new = known.state.keys() - packed.keys(), packed.keys() - known.state.keys()

        def names(which: frozenset[str]) -> frozenset[str]:
            return (which - moved) | (new if which & moved else frozenset())

        return _Known(packed, names(known.counted), names(known.by_value))

    def _find(self, group: Mapping[str, Any], parameter: torch.Tensor) -> _Known:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return _Known({})
        of_zeros = self._probe(group, parameter, torch.Tensor.zero_)
        if not of_zeros.state:
            return of_zeros
        of_others = self._probe(_without_decay(group), parameter, lambda trial: trial.fill_(_OTHER_VALUE))
        differing = (
            name for name in of_others.state if not same_value(of_zeros.state.get(name), of_others.state[name])
        )
        state = {**of_zeros.state, **of_others.state}  # decay may make some of it
        return replace(of_zeros, state=state, by_value=frozenset(differing))

    def _probe(self, group: Mapping[str, Any], parameter: torch.Tensor, fill: Fill) -> _Known:
        """Find a trial parameter's state, and the names of values that a non-zero gradient changes."""
        tried: list[Recorded] = []
        errors: list[UnsupportedValueError] = []
        for gradient, its_group in ((0.0, group), (_OTHER_VALUE, _without_decay(group))):
            try:
                tried.append(self._try(its_group, parameter, fill, gradient))
            except UnsupportedValueError as error:
                errors.append(error)
        if not tried:
            raise errors[0]
        state = {name: value for each in reversed(tried) for name, value in each.initial().items()}
        last = tried[-1]
        counted = frozenset(name for name in last if not same_value(state[name], last[name]))
        return _Known({name: copy_value(value) for name, value in state.items()}, counted)

    def _try(self, group: Mapping[str, Any], parameter: torch.Tensor, fill: Fill, gradient: float) -> Recorded:
        """Record a trial step: without a closure, else with one, else with a sparse gradient."""
        first_error: Exception | None = None
        missing: list[str] = []
        for sparse, closure in ((False, None), (False, _closure), (True, None)):
            try:
                trial = _trial(parameter, fill, gradient, sparse=sparse)  # a DTensor has no sparse gradient
                with make_stand_in(self.optimizer, group, trial) as (stand_in, missing):
                    step_stand_in(stand_in, closure)
                    state = dict(stand_in.state)
            except Exception as error:  # noqa: BLE001 - foreign code on a stand-in; raised below
                first_error = first_error or error
            else:
                first_error = None  # its traceback holds this frame, and so the tensors
                return self._recorded(state, trial)
        raise self._refusal(first_error, missing) from first_error

    def _recorded(self, state: Mapping[Any, Any], trial: torch.Tensor) -> Recorded:
        others = [key for key in state if key is not trial]
        if others:
            raise nameless_state(self.optimizer, others)
        recorded: Any = state.get(trial)
        return Recorded() if recorded is None else recorded

    def _refusal(self, error: Exception | None, missing: list[str]) -> UnsupportedValueError:
        lacks = f"; it could not be given {', '.join(missing)}" if missing else ""
        return UnsupportedValueError(
            f"{class_name(self.optimizer)} has no state for some parameter, and the state that it would begin "
            f"with cannot be found out on a copy ({type(error).__name__}: {error}){lacks}: take a step before, or "
            "register an OptimizerAdapter with `initial_state` (hook dcp_register_state_adapters); nothing was changed"
        )


def _size(state: Mapping[str, Any], name: str) -> int:
    value = state[name]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _closure() -> torch.Tensor:
    return torch.zeros((), device="cpu")


def _trial(parameter: torch.Tensor, fill: Fill, value: float, *, sparse: bool) -> torch.Tensor:
    with torch.no_grad():
        trial = torch.zeros_like(parameter.detach())
        fill(trial)
        gradient = torch.full_like(parameter.detach(), value)
    trial.requires_grad_()
    trial.grad = _no_entries(gradient) if sparse and gradient.dim() else gradient
    return trial


def _no_entries(gradient: torch.Tensor) -> torch.Tensor:
    rows = torch.empty((1, 0), dtype=torch.int64, device=gradient.device)
    return torch.sparse_coo_tensor(rows, gradient[:0], gradient.shape, check_invariants=True)


def _without_decay(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Weight decay would make the first momentum depend on the weights."""
    return {**group, _WEIGHT_DECAY: 0.0} if isinstance(group.get(_WEIGHT_DECAY), float) else group


def _kind(parameter: torch.Tensor) -> Hashable:
    spec: Hashable = dtensor_layout(parameter) if is_dtensor(parameter) else None
    return tuple(parameter.shape), parameter.dtype, parameter.device, parameter.stride(), spec
