"""Lazy imports for the `__init__` of packages: a module is imported when one of its names is first used.

Every process that searches for plug-ins imports all plug-in modules, and with each one the package that contains it. A
package that imported all of its code at once would delay even a listing of checkpoints.
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
    """Return the functions `__getattr__` and `__dir__` for a package that imports its public names on first use.

    No public name may equal the name of a submodule of the package: once imported, the submodule would replace it.

    Args:
        package: `__name__` of the package.
        homes: Module name → names that the package re-exports from that module, `name as other` under another name;
            the names of the package itself are submodules.

    Example:
        ```python
        from dcp_hooks import import_lazily

        __getattr__, __dir__ = import_lazily(__name__, {"acme.storage": ("VaultReader", "VaultWriter")})
        ```
    """
    # Public name → its module, and its name there.
    modules = {
        entry.rpartition(" as ")[2]: (module, entry.partition(" as ")[0])
        for module, names in homes.items()
        for entry in names
    }
    found = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = modules[name]
        if module == package:
            return importlib.import_module(f"{package}.{original}")
        found[name] = getattr(importlib.import_module(module), original)
        return found[name]

    def names() -> list[str]:
        return sorted({*found, *modules})

    return get, names
