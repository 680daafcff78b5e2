"""Replace stock at its first import, at no cost without that import. Imports only the standard library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["replace_at_import"]

_STOCK = "torch.distributed.checkpoint"


class _Finder:
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
    """Replace stock for the rest of the process."""
    from dcp_bridge.replacement.replacement import replace_stock  # noqa: PLC0415 - it imports torch

    replace_stock(any_torch=any_torch)


def replace_at_import(*, any_torch: bool) -> None:
    """Replace stock at its first import, or now if already imported, for the rest of the process.

    Unless `any_torch`, the import of stock raises `DcpError` for untested versions of torch.
    """
    if _STOCK in sys.modules:
        replace_now(any_torch=any_torch)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(any_torch=any_torch))
