"""Imports by name on first use: public names of a package, `module:attribute` of a plug-in, and optional parts.

Parts are functions of higher packages that lower packages use if installed. Only the private table here names them;
other packages use hooks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any


def import_lazily(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that imports names on first use; set its `__all__`.

    ```python
    from dcp_base import import_lazily

    __getattr__, __dir__ = import_lazily(__name__, {"acme.storage": ("VaultReader", "VaultWriter")})
    ```

    A public name must not equal a submodule's name, which would replace it when imported.

    Args:
        package: `__name__` of the package.
        homes: Module → names to re-export, `name as other` under another name; for the package itself, its submodules.
    """
    # Public name → (module, name in it).
    modules = {
        entry.rpartition(" as ")[2]: (module, entry.partition(" as ")[0])
        for module, names in homes.items()
        for entry in names
    }
    found = vars(sys.modules[package])
    found.setdefault("__all__", sorted(modules))

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


# Not `pip install NAME`, while others may own the name on the package index.
SOURCE = ", from the source of your other dcp packages"
PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "adaptive": ("dcp_transforms.adaptive:AdaptiveCompression", "Compresses saves where that makes them faster."),
        "bar": ("dcp_inspect.visuals.progress_bar:observe", "Draws progress bars."),
        "bridge": ("dcp_bridge.bridging:from_stock", "Adapts objects of torch.distributed.checkpoint."),
        "exchange": ("dcp_exchange.together:read_together", "Reads for the ranks of a cooperative load."),
        "run.tiers.toml": ("dcp_tiers.tiers:Tiers.read", "Reads a file that describes a root of several tiers."),
        "dcp tiers": ("dcp_tiers.commands:show_tiers", "Show which checkpoint is in which tier."),
        "dcp promote": ("dcp_tiers.commands:promote_tiers", "Copy to each tier what it must still get."),
        "dcp prove": ("dcp_prove.command:command", "Prove that a script resumes exactly after a kill."),
        "dcp rehearse": (
            "dcp_prove.rehearsing.rehearse_command:command",
            "Rehearse a save of a large job in virtual time.",
        ),
        "dcp keeper": (
            "dcp_memory.command:command",
            "Start, stop and show keepers, which hold checkpoints in memory.",
        ),
    }
)
"""Part → its `module:attribute`, and its purpose."""


def is_installed(part: str) -> bool:
    """Return whether a part's package is installed, without importing it."""
    from importlib.util import find_spec  # noqa: PLC0415 - front doors import this module: it stays small

    return find_spec(PARTS[part][0].partition(".")[0]) is not None


def import_part(part: str) -> Any:
    """Import and return a part. Raises PluginNotFoundError, which names its package, or PluginLoadError."""
    path, does = PARTS[part]
    package = path.partition(".")[0].replace("_", "-")
    if not is_installed(part):
        from dcp_base.errors import PluginNotFoundError  # noqa: PLC0415 - as above

        raise PluginNotFoundError(f"{package} is not installed. {does} Install {package}{SOURCE}")
    return resolve(path, package)


def resolve(path: str, owner: object) -> Any:
    """Import a `module:attribute`. Raises PluginLoadError, which names `owner`, such as the plug-in."""
    module, _, attribute = path.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        from dcp_base.errors import PluginLoadError  # noqa: PLC0415 - as above

        raise PluginLoadError(f"{owner} names {path}, which cannot be imported: {reason}") from error
    return value
