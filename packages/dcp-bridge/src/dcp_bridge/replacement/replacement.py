"""`replace_stock` and `original_stock`: replacement of stock by this project in the whole process, and its end."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed

from dcp_bridge.replacement.bound_names import BoundName, bound_names, rebind
from dcp_bridge.replacement.mirror import MIRROR, STOCK, check_torch, import_mirror, import_stock, own_names
from dcp_bridge.replacement.stand_in import ReloadGuard, StandInModule, take_back
from dcp_core.toolkit import library_logger

__all__ = ["Replacement", "original_stock", "replace_stock"]

_log = library_logger(__name__)
_lock = threading.RLock()
_running: list[_Swap] = []  # at most one

# Modules whose functions are what users call; the rest are parts that such calls are given.
_CALLS = ("state_dict", "state_dict_loader", "state_dict_saver")
_SHOWN_NAMES = 4


class Replacement:
    """Result of `replace_stock`: lists the replaced names, and undoes the replacement. A context manager.

    Attributes:
        torch_version: Version of torch.
        replaced: Name of a module of stock → its names that now refer to our objects.
        kept: Name of a module of stock → its public names that our module lacks, which still refer to stock's objects.
        rebound: Globals of loaded modules, as `module.name`, whose values were stock's objects and now are ours.
        left: Globals that still refer to stock's objects, because their module derives a class from a class of stock.
        active: Whether this replacement has not been undone.

    Example:
        ```python
        from dcp_bridge import replace_stock

        replacement = replace_stock()
        try:
            print(replacement)  # here runs the code that cannot be edited
        finally:
            replacement.undo()
        ```
    """

    def __init__(self, swap: _Swap) -> None:
        self._swap = swap
        self.torch_version = str(torch.__version__)
        self.replaced = {name: tuple(sorted(own)) for name, own in swap.replaced.items()}
        self.kept = swap.kept
        self.rebound = tuple(map(str, swap.rebound))
        self.left = tuple(map(str, swap.left))
        self.active = True

    def undo(self) -> None:
        """Restore stock, unless another replacement is still active. A second call does nothing."""
        with _lock:
            if self.active:
                self.active = False
                self._swap.release()

    def __enter__(self) -> Replacement:
        if not self.active:
            raise RuntimeError("this replacement has been undone: call replace_stock() again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        names = sum(map(len, self.replaced.values()))
        kept = sorted({name for each in self.kept.values() for name in each})
        parts = [
            f"{STOCK} of torch {self.torch_version} means {MIRROR}: {names} names of {len(self.replaced)} modules",
            f"{_some(kept)} stay PyTorch's" if kept else "",
            f"bound before and replaced: {_some(self.rebound)}" if self.rebound else "",
            f"bound before and left: {_some(self.left)}" if self.left else "",
            "" if self.active else "undone",
        ]
        return f"<Replacement: {'; '.join(filter(None, parts))}>"


class _Swap:
    """The actual replacement in this process, which all active `Replacement`s share."""

    def __init__(self, stock: dict[str, ModuleType], mirror: dict[str, ModuleType]) -> None:
        self.holders = 0
        self.stock = {name: module for name, module in stock.items() if name in mirror}
        self.own = {name: own_names(module, mirror[name]) for name, module in self.stock.items()}
        self.replaced = {f"{STOCK}.{name}".rstrip("."): dict(own) for name, own in self.own.items()}
        self.kept = {
            module.__name__: lacking
            for name, module in stock.items()
            if (lacking := tuple(sorted(_defined(module) - self.own.get(name, {}).keys())))
        }
        self.stand_ins = {name: StandInModule(module, self.own[name]) for name, module in self.stock.items()}
        self.entries: list[tuple[str, StandInModule, ModuleType]] = []
        self.rebound: list[BoundName] = []
        self.left: list[BoundName] = []
        self.guard = ReloadGuard()

    def begin(self) -> None:
        """Put the stand-ins where the modules of stock are, and swap the names that modules have bound."""
        modules = {id(module): (module, self.stand_ins[name]) for name, module in self.stock.items()}
        # Submodules are attributes of the package as well.
        self.own[""] |= {name: stand_in for name, stand_in in self.stand_ins.items() if name}
        values = {
            id(theirs): (theirs, ours)
            for name, module in self.stock.items()
            for key, ours in self.own[name].items()
            if _is_defined_by_stock(theirs := vars(module).get(key)) and theirs is not ours
        }
        for key, module in list(sys.modules.items()):
            if id(module) in modules:
                stand_in = modules[id(module)][1]
                self.entries.append((key, stand_in, module))
                sys.modules[key] = stand_in
        vars(torch.distributed)["checkpoint"] = self.stand_ins[""]
        sys.meta_path.insert(0, self.guard)
        calls = {key for key, (theirs, _) in values.items() if _is_call(theirs)}
        bases = {key for key, (theirs, _) in values.items() if isinstance(theirs, type) and not _is_protocol(theirs)}
        self.rebound, self.left = rebind(modules | values, frozenset(calls | modules.keys()), frozenset(bases))

    def release(self) -> None:
        """Count one `Replacement` less, and undo the replacement with the last one."""
        self.holders -= 1
        if not self.holders:
            _running.clear()
            self.end()

    def end(self) -> None:
        """Restore stock's modules and names, also in modules that were imported during the replacement."""
        for key, stand_in, module in self.entries:
            if sys.modules.get(key) is stand_in:
                sys.modules[key] = module
        if vars(torch.distributed).get("checkpoint") is self.stand_ins[""]:
            vars(torch.distributed)["checkpoint"] = self.stock[""]
        if self.guard in sys.meta_path:
            sys.meta_path.remove(self.guard)
        for own in self.own.values():
            own.clear()
        for each in reversed(self.rebound):
            each.restore()
        back = {id(stand_in): (stand_in, self.stock[name]) for name, stand_in in self.stand_ins.items()}
        for each in bound_names(back, with_torch=True):
            each.bind()
        for stand_in in self.stand_ins.values():
            take_back(stand_in)


def replace_stock(*, any_torch: bool = False) -> Replacement:
    """Replace `torch.distributed.checkpoint` by our modules in this process, for code that cannot be edited.

    After this call, imports of stock's modules or of names in them, and attribute access, return our objects. Globals
    of loaded modules that refer to stock's objects are replaced. Names that this project lacks are not replaced, and
    calls of stock's own functions and classes use only stock's objects. The replacement lasts until `Replacement.undo`,
    or until the end of the `with` block; of several replacements, the last one to end restores stock. Forked processes
    inherit the replacement; other processes need a replacement of their own: see `DCP_REPLACE_STOCK` in the package's
    README.

    Args:
        any_torch: Whether untested versions of torch are accepted.

    Returns:
        The replacement, whose attributes list the replaced names; a summary is logged once at level INFO.

    Raises:
        UntestedTorchError: The replacement was not tested with this version of torch.
        PluginNotFoundError: `dcp-all`, or a package that it needs, is not installed.

    Ranks: one; not collective, but all ranks should call `replace_stock` with the same arguments.

    Example:
        ```python
        import torch
        import torch.distributed.checkpoint as dcp

        from dcp_bridge import replace_stock

        with replace_stock():
            dcp.save({"weight": torch.ones(3)}, checkpoint_id="step-1")  # a manifest, checksums, atomic
        ```
    """
    if not any_torch:
        check_torch(torch.__version__)
    # Imports wait for those of other threads, so none may happen under the lock.
    stock, mirror = import_stock(), import_mirror()
    with _lock:
        begins = not _running
        if begins:
            swap = _Swap({name: _original(module) for name, module in stock.items()}, mirror)
            try:
                swap.begin()
            except BaseException:
                swap.end()
                raise
            _running.append(swap)
        _running[0].holders += 1
        made = Replacement(_running[0])
    if begins:
        _log.info("%s", repr(made))
    return made


def original_stock(name: str = "") -> ModuleType:
    """Return the original module of stock, even during a replacement.

    Args:
        name: Name of the submodule, such as "state_dict"; if empty, the package is returned.

    Example:
        ```python
        from dcp_bridge import original_stock, replace_stock

        with replace_stock():
            assert original_stock().save.__module__ == "torch.distributed.checkpoint.state_dict_saver"
        ```
    """
    return _original(importlib.import_module(f"{STOCK}.{name}".rstrip(".")))


def _original(module: ModuleType) -> ModuleType:
    found: ModuleType = vars(module)["__stock__"] if isinstance(module, StandInModule) else module
    return found


def _defined(module: ModuleType) -> set[str]:
    """Return the public functions and classes that a module of stock defines."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
    }


def _is_defined_by_stock(value: Any) -> bool:
    """Whether a value is a function or class of stock; other values, like constants, may belong to any module."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    return f"{getattr(value, '__module__', '')}.".startswith(f"{STOCK}.")


def _is_call(value: Any) -> bool:
    return inspect.isroutine(value) and value.__module__.removeprefix(f"{STOCK}.") in _CALLS


def _is_protocol(kind: type) -> bool:
    """Whether a class is a protocol, like `Stateful`: a class derived from it does not depend on stock."""
    return bool(getattr(kind, "_is_protocol", False))


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
