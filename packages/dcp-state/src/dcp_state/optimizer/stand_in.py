"""Stand-in of an optimizer, a copy that shares no mutable data with it, and the recording of one trial step.

The stand-in is an object of the same class with copies of the optimizer's plain data, and with one trial parameter.
Hooks, replaced methods (as schedulers and profilers make) and data that cannot be copied are left out. A trial step
that needs them fails, without a change of the optimizer itself.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from dcp_state.errors import UnsupportedOptimizerError, class_name
from dcp_state.optimizer.copying import copy_value
from dcp_state.optimizer.inner_optimizers import holds_its_own_state
from dcp_state.optimizer.isolated_copy import IsolatedCopies, NotPlainDataError
from dcp_state.random_state import random_state_kept

__all__ = ["Recorded", "make_stand_in", "prepares_state", "step_stand_in"]

_HOOKS_LOCK = threading.Lock()


class _StopHereError(Exception):
    """Raised where the update would begin, to stop a trial step."""


class Recorded(dict[str, Any]):
    """State dict of the trial parameter, which records the first value under each name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        self.update(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, copy_value(value))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Set a default like `dict.setdefault`, and record the value."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update like `dict.update`, and record the values."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, other: Any) -> Recorded:  # type: ignore[override,misc]
        self.update(other)
        return self

    def initial(self) -> dict[str, Any]:
        """Return name → first recorded value, from before the optimizer's first update."""
        return {name: _before(name, self.first[name], value) for name, value in self.items()}


def _before(name: str, first: Any, last: Any) -> Any:
    """Return the first value; the last value instead if its type, dtype or shape differs."""
    if not _alike(first, last):
        return last
    if name == "step" and _is_number(first) and float(first) == float(last) != 0:
        return first - first  # made and counted at once
    return first


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are interchangeable as storage: same type, dtype, shape and structure."""
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
    """State by parameter, whose entries are `Recorded`."""

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
    """Make a stand-in that trains trial parameters, for the duration of a `with` block.

    After the block its attributes are cleared: a stand-in that references itself, as some optimizers do, would keep its
    tensors until the next garbage collection.

    Args:
        optimizer: The optimizer, which is not changed; no code of its class is called.
        group: Parameter group whose hyperparameters the stand-in uses.
        parameters: The trial parameters of the stand-in, at least one.

    Yields:
        The stand-in, and the names of attributes and hyperparameters that could not be copied to it.

    Raises:
        UnsupportedOptimizerError: `param_groups` and `state` are properties, so they may belong to another object.
    """
    kind = type(optimizer)
    if not holds_its_own_state(optimizer):
        raise UnsupportedOptimizerError(f"{class_name(optimizer)} shows groups and state that are not its own")
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
    except NotPlainDataError:
        missing.append(f"{name!r}, a {type(value).__name__}")


def _shadow_class_attributes(kind: type, attributes: dict[str, Any], copies: IsolatedCopies) -> None:
    """Give the stand-in copies of the mutable class attributes that its step could change."""
    for each in kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]:
        for name, value in vars(each).items():
            changeable = isinstance(value, dict | list | set | deque | torch.Tensor) and not name.startswith("__")
            if changeable and name not in attributes:
                try:
                    attributes[name] = copies.copy(value)
                except NotPlainDataError:
                    raise UnsupportedOptimizerError(
                        f"the class attribute {name!r} of {each.__qualname__} holds a value that cannot be copied"
                    ) from None


def step_stand_in(
    stand_in: torch.optim.Optimizer, closure: Callable[[], Any] | None, *, only_prepare: bool = False
) -> None:
    """Take one step of a stand-in without side effects: generators of random numbers, hooks and modes are restored.

    A step of an optimizer class of torch ends after the optimizer has made its state, before the update.

    Args:
        stand_in: Stand-in of `make_stand_in`.
        closure: Argument for `step`; None calls `step` without an argument.
        only_prepare: Whether to end before the update even if no state was made; requires `prepares_state`.
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
    """Whether the optimizer's step is torch's own, with a method that makes state before any update."""
    return _is_of_torch(_step_of(type(optimizer)), type(optimizer))


def _step_of(kind: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's `step` without the decorator that runs hooks."""
    function: Any = kind.step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    return function  # type: ignore[no-any-return]


def _is_of_torch(step: Callable[..., Any], kind: type[torch.optim.Optimizer]) -> bool:
    """Whether `step` and the method with which it makes state are written in one module of torch."""
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
    """Disable hooks registered for all optimizers: a step may call a base class's step, which runs them."""
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
