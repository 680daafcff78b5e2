"""Replacement of stock at its first import; a process that never imports stock has no cost.

Imported by `python -m dcp_bridge`, and at the start of Python by `dcp_replace_stock.pth` if `DCP_REPLACE_STOCK` is
set. Imports only the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ANY_TORCH", "VARIABLE", "replace_at_import"]

VARIABLE = "DCP_REPLACE_STOCK"
ANY_TORCH = "any-torch"
_STOCK = "torch.distributed.checkpoint"
_OFF = ("", "0", "false", "no", "off")


class _Finder:
    """Import hook for stock: the module is found by the finders after it, and replaced when it has been loaded."""

    def __init__(self, *, any_torch: bool) -> None:
        self.any_torch = any_torch

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _STOCK:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """Loader of stock that replaces stock as soon as it is loaded; delegates everything else to the wrapped loader."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        replace_now(any_torch=self._finder.any_torch)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def replace_now(*, any_torch: bool) -> None:
    """Replace stock now, for the rest of the process; `any_torch` as for `replace_at_import`."""
    from dcp_bridge.replacement.replacement import replace_stock  # noqa: PLC0415 - it imports torch

    replace_stock(any_torch=any_torch)


def replace_at_import(*, any_torch: bool) -> None:
    """Replace stock at its first import, or now if it is already imported, for the rest of the process.

    Args:
        any_torch: Whether untested versions of torch are accepted; otherwise, the import of stock raises
            `UntestedTorchError` for them.
    """
    if _STOCK in sys.modules:
        replace_now(any_torch=any_torch)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(any_torch=any_torch))


def follow_environment() -> None:
    """Replace stock if `DCP_REPLACE_STOCK` is set in the environment, and is not empty, 0, false, no or off."""
    value = os.environ.get(VARIABLE, "").strip().lower()
    if value not in _OFF:
        replace_at_import(any_torch=value == ANY_TORCH)
