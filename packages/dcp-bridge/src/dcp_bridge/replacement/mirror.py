"""Stock's modules, our modules of the same names, the names that are replaced, and the supported versions of torch.

Our modules are those of `dcp_all`, which imports this package. So this package does not depend on `dcp_all`, but
imports it by name when a replacement begins.
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

__all__ = ["MIRROR", "STOCK", "UntestedTorchError", "check_torch", "import_mirror", "import_stock", "own_names"]

STOCK = "torch.distributed.checkpoint"
MIRROR = "dcp_all"
_OLDEST, _NEWEST = (2, 6), (2, 15)


class UntestedTorchError(DcpError, RuntimeError):
    """The replacement of stock was never tested with this version of torch; names or behaviour may differ."""


def check_torch(version: str) -> None:
    """Check that the replacement was tested with a version of torch.

    Raises:
        UntestedTorchError: The version is older or newer than the tested ones, or is no version number.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise UntestedTorchError(
            f"torch is {version}, and replacing {STOCK} was tested with {oldest} to {newest}: install one of these or "
            "a newer dcp-bridge. To try it with this one, pass replace_stock(any_torch=True), set "
            "DCP_REPLACE_STOCK=any-torch, or add --any-torch to `python -m dcp_bridge`"
        )


def import_stock() -> dict[str, ModuleType]:
    """Import stock and its direct submodules; returns name → module, with "" for the package.

    Submodules that cannot be imported are left out. All others are imported, since none may be imported for the first
    time during a replacement. If stock is replaced, its stand-ins are returned.
    """
    package = importlib.import_module(STOCK)
    found = {"": package}
    for info in pkgutil.iter_modules(package.__path__):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a module that is deprecated says so to those who import it themselves
            try:
                found[info.name] = importlib.import_module(f"{STOCK}.{info.name}")
            except ImportError:  # it needs a package that is not installed
                continue
    return found


def import_mirror() -> dict[str, ModuleType]:
    """Import our modules that have the names of stock's modules; returns name → module, with "" for the package.

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
    """Return name → our object, for the names that a module of stock and our module both have, except submodules."""
    shared = [name for name in mirror.__all__ if name in vars(stock)]
    found = {name: getattr(mirror, name) for name in shared}
    return {name: value for name, value in found.items() if not isinstance(value, types.ModuleType)}
