"""Lazy imports for the `__init__` of packages: a module is imported when one of its names is first used.

Python imports a package before its plug-in module, and every process that looks for plug-ins imports all plug-in
modules: an `__init__` that imports the code of saves and loads would delay even a listing of checkpoints.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["import_lazily"]


def import_lazily(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose names are imported when they are first used.

    No name may be that of a submodule of the package: importing the submodule would hide it.

    Args:
        package: The package's `__name__`.
        homes: Module → names that the package re-exports from it.

    Example:
        ```python
        from dcp_hooks import import_lazily

        __getattr__, __dir__ = import_lazily(__name__, {"acme.storage": ("VaultReader", "VaultWriter")})
        ```
    """
    modules = {name: module for module, names in homes.items() for name in names}
    found = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found[name] = getattr(importlib.import_module(modules[name]), name)
        return found[name]

    def names() -> list[str]:
        return sorted({*found, *modules})

    return get, names
