"""Globals of loaded modules that refer to stock's modules, functions or classes: search, replacement, restoring.

Only globals of modules are searched. Other references to stock's objects (attributes of classes, closures, default
arguments, containers, `functools.partial`) are not found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

__all__ = ["BoundName", "bound_names", "is_derived_from", "rebind"]

# Torch's own modules work with its records, and so does the bridge.
_SPARED = ("torch.", "dcp_bridge.")


@dataclass(frozen=True, slots=True)
class BoundName:
    """Global of a loaded module, with its value before and during a replacement of stock.

    Attributes:
        module: Name of the module.
        name: Name of the global.
        namespace: `__dict__` of the module.
        old: Value before the replacement.
        new: Value during the replacement.
    """

    module: str
    name: str
    namespace: dict[str, Any]
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def bind(self) -> None:
        """Set the global to the new value, unless other code has meanwhile set it to another value."""
        if self.namespace.get(self.name) is self.old:
            self.namespace[self.name] = self.new

    def restore(self) -> None:
        """Set the global to the old value, unless other code has meanwhile set it to another value."""
        if self.namespace.get(self.name) is self.new:
            self.namespace[self.name] = self.old


def loaded_modules(*, with_torch: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the `__dict__` of each loaded module, without loading lazy modules.

    Args:
        with_torch: Whether to include the modules of torch and of this package.
    """
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and (with_torch or not f"{name}.".startswith(_SPARED)):
            yield name, vars(module)


def bound_names(swaps: Mapping[int, tuple[Any, Any]], *, with_torch: bool = False) -> list[BoundName]:
    """Return the globals of loaded modules whose values are objects to be replaced.

    Args:
        swaps: `id(old)` → (old object, new object).
        with_torch: Whether to include the modules of torch and of this package.
    """
    return [
        BoundName(module, name, namespace, *swaps[id(value)])
        for module, namespace in loaded_modules(with_torch=with_torch)
        for name, value in list(namespace.items())
        if id(value) in swaps and not name.startswith("__")
    ]


def is_derived_from(namespace: Mapping[str, Any], classes: frozenset[int]) -> bool:
    """Whether a module defines a class that is derived from one of the classes with the given ids."""
    return any(
        isinstance(value, type)
        and value.__module__ == namespace.get("__name__")
        and any(id(base) in classes for base in value.__mro__[1:])
        for value in list(namespace.values())
    )


def rebind(
    swaps: Mapping[int, tuple[Any, Any]], calls: frozenset[int], bases: frozenset[int]
) -> tuple[list[BoundName], list[BoundName]]:
    """Replace stock's objects in the globals of loaded modules.

    In a module that defines a class derived from a class of stock, only modules and functions are replaced: the derived
    class keeps its base class, so other classes that the module uses must remain classes of stock, too.

    Args:
        swaps: `id(old)` → (old object, new object).
        calls: Ids of stock's functions and modules, which are replaced everywhere.
        bases: Ids of stock's classes from which other modules may derive classes.

    Returns:
        The globals that were replaced, and the globals that were left unchanged.
    """
    swapped, left = [], []
    derived: dict[str, bool] = {}
    for each in bound_names(swaps):
        if each.module not in derived:
            derived[each.module] = is_derived_from(each.namespace, bases)
        if derived[each.module] and id(each.old) not in calls:
            left.append(each)
        else:
            each.bind()
            swapped.append(each)
    return swapped, left
