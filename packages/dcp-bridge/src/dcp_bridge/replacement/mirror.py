"""Stock's modules, our modules of the same names (from `dcp_all`), and supported versions of torch.

`dcp_all` imports this package, so it is imported by name when a replacement begins.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
import warnings
from types import ModuleType
from typing import Any

from dcp_core import DcpError
from dcp_core.errors import PluginNotFoundError

__all__ = ["MIRROR", "STOCK", "check_torch", "import_mirror", "import_stock", "own_names"]

STOCK = "torch.distributed.checkpoint"
MIRROR = "dcp_all"
_OLDEST, _NEWEST = (2, 6), (2, 15)


def check_torch(version: str) -> None:
    """Raise DcpError if the replacement was not tested with a version of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise DcpError(
            f"torch is {version}, and replacing {STOCK} was tested with {oldest} to {newest}: install one of these or "
            "a newer dcp-bridge. To try it with this one, pass replace_stock(any_torch=True), or "
            "add --any-torch to `python -m dcp_bridge`"
        )


def import_stock() -> dict[str, ModuleType]:
    """Import stock and its submodules; return name → module, "" for the package, or stand-ins if stock is replaced.

    Submodules that fail to import are omitted. None may be imported for the first time during a replacement.
    """
    package = importlib.import_module(STOCK)
    found = {"": package}
    for info in pkgutil.iter_modules(package.__path__):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # users who import a deprecated module get its warning
            try:
                found[info.name] = importlib.import_module(f"{STOCK}.{info.name}")
            except ImportError:  # needs a missing package
                continue
    return found


def import_mirror() -> dict[str, ModuleType]:
    """Import our modules that mirror stock's; return name → module, "" for the package.

    Raises:
        PluginNotFoundError: `dcp-all`, or a package that it needs, is not installed.
    """
    try:
        package = importlib.import_module(MIRROR)
        names = [info.name for info in pkgutil.iter_modules(package.__path__)]
        return {"": package} | {name: importlib.import_module(f"{MIRROR}.{name}") for name in names}
    except ModuleNotFoundError as error:
        lost = (error.name or MIRROR).partition(".")[0].replace("_", "-")
        raise PluginNotFoundError(
            f"replacing {STOCK} needs all packages of dcp-all, and {lost} is not installed: install dcp-all from "
            "the source of your other dcp packages"
        ) from error


def own_names(stock: ModuleType, mirror: ModuleType) -> dict[str, Any]:
    """Return name → our object for names in both modules, except submodules."""
    shared = [name for name in mirror.__all__ if name in vars(stock)]
    found = {name: getattr(mirror, name) for name in shared}
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
