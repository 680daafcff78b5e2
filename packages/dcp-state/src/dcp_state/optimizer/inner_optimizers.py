"""Search for the optimizers that hold the state in wrappers and containers (accelerate, Lightning, torchtitan, …).

A wrapper is recognised by groups and state that are the inner optimizer's objects. Others that contain optimizers are
refused, unless an adapter returns the inner ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_state.adapters import installed_adapters
from dcp_state.report import class_name

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
_OWN = ("param_groups", "state", "defaults")
_DEPTH = 3


def as_optimizers(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return the inner optimizers, which hold the state, each once.

    UnsupportedValueError: not a `torch.optim.Optimizer`, or it contains others in an unknown way.
    """
    given: Any = optimizers
    if isinstance(given, torch.optim.Optimizer) or not isinstance(given, Iterable):
        given = (given,)
    found: dict[int, torch.optim.Optimizer] = {}
    for each in given:
        found.update({id(inner): inner for inner in _unwrap(each, ())})
    return tuple(found.values())


def holds_its_own_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether groups and state are attributes, not properties."""
    attributes = _attributes(optimizer)
    kind = type(optimizer)
    plain = all(name in attributes and not hasattr(_static(kind, name), "__get__") for name in _OWN[:2])
    return plain and type(optimizer).__setattr__ is object.__setattr__


def _unwrap(optimizer: Any, outer: Sequence[Any]) -> Iterator[torch.optim.Optimizer]:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedValueError(
            f"{class_name(optimizer)} is no torch.optim.Optimizer; pass the optimizer that it wraps, or save what its "
            "own state_dict() gives as a value of its own"
        )
    inner = _inner(optimizer)
    if inner is None:
        yield optimizer
        return
    for each in inner:
        if any(each is seen for seen in (*outer, optimizer)):
            raise UnsupportedValueError(f"{class_name(optimizer)} holds an optimizer that holds it in turn")
        yield from _unwrap(each, (*outer, optimizer))


def _inner(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer] | None:
    """Return a wrapper's inner optimizers, else None."""
    adapter = installed_adapters().of_optimizer(optimizer)
    named = adapter.inner(optimizer) if adapter is not None else None
    if named is not None:
        return named
    attributes = _attributes(optimizer)
    held = _held_optimizers(optimizer, attributes)
    if not held:
        return None
    if _shows_what_one_holds(optimizer, held) or _joins_groups(optimizer, held):
        return held
    if _is_container(optimizer, attributes, held):
        return held
    names = ", ".join(sorted({class_name(each) for each in held}))
    raise UnsupportedValueError(
        f"{class_name(optimizer)} holds other optimizers ({names}), and how its state belongs to theirs is not known: "
        "pass the inner ones if they hold all state, or register an OptimizerAdapter with `inner` "
        "(hook dcp_register_state_adapters); nothing was changed"
    )


def _held_optimizers(optimizer: Any, attributes: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    return [
        each for each in _found({name: attributes[name] for name in attributes if name not in _OWN})
        if each is not optimizer
    ]  # fmt: skip


def _found(value: Any) -> list[torch.optim.Optimizer]:
    found: dict[int, torch.optim.Optimizer] = {}

    def look(each: Any, depth: int) -> None:
        if isinstance(each, torch.optim.Optimizer):
            found[id(each)] = each
        elif depth and isinstance(each, Mapping):
            for inside in each.values():
                look(inside, depth - 1)
        elif depth and isinstance(each, list | tuple | set | frozenset):
            for inside in each:
                look(inside, depth - 1)

    look(value, _DEPTH)
    return list(found.values())


def _shows_what_one_holds(optimizer: Any, held: Sequence[Any]) -> bool:
    return len(held) == 1 and optimizer.param_groups is held[0].param_groups and optimizer.state is held[0].state


def _joins_groups(optimizer: Any, held: Sequence[Any]) -> bool:
    own = {id(group) for group in optimizer.param_groups}
    inner = {id(group) for each in held for group in each.param_groups}
    return own == inner and len(held) > 1 and not _adds_state(optimizer, held)


def _is_container(optimizer: Any, attributes: Mapping[str, Any], held: Sequence[Any]) -> bool:
    """Return whether `optimizers` holds all trained parameters and all state."""
    if len(_found(attributes.get("optimizers", ()))) != len(held) or _adds_state(optimizer, held):
        return False
    own = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    inner = [id(parameter) for each in held for group in each.param_groups for parameter in group["params"]]
    trained = {key for key, parameter in own.items() if parameter.requires_grad}
    return len(inner) == len(set(inner)) and trained <= set(inner) <= own.keys()


def _adds_state(optimizer: Any, held: Sequence[Any]) -> bool:
    return any(not any(each.state.get(key) is value for each in held) for key, value in optimizer.state.items())


def _attributes(optimizer: Any) -> dict[str, Any]:
    found: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    return found


def _static(kind: type, name: str) -> Any:
    return inspect.getattr_static(kind, name, None)
