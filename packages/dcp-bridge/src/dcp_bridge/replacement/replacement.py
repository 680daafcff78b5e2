"""`replace_stock` and `original_stock`: replace stock in the whole process, and undo it.

Stand-ins replace stock's modules in `sys.modules`, and our objects replace stock's in globals of loaded modules, but
not in class attributes, closures, defaults, containers and `functools.partial`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import importlib
import inspect
import pickle
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import FrameType, ModuleType
from typing import Any

import torch
import torch.distributed

from dcp_base.logs import library_logger
from dcp_core import DcpError
from dcp_core.errors import PluginNotFoundError

STOCK = "torch.distributed.checkpoint"
MIRROR = "dcp_all"
_OLDEST, _NEWEST = (2, 6), (2, 15)

_log = library_logger(__name__)
_lock = threading.RLock()
_running: list[_Swap] = []  # at most one

# Modules with functions that users call; the others contain parts to pass to these functions.
_CALLS = ("state_dict", "state_dict_loader", "state_dict_saver")
_SHOWN_NAMES = 4


class Replacement:
    """Result of `replace_stock`, and a context manager that undoes it.

    Attributes:
        torch_version: Version of torch.
        replaced: Module of stock → names that now refer to our objects.
        kept: Module of stock → public names that we lack.
        rebound: Globals of loaded modules, as `module.name`, that were changed.
        left: Globals that were not, because their module derives from a class of stock.
        active: Whether this replacement is not undone.
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
        """Restore stock, unless another replacement is active. A second call does nothing."""
        with _lock:
            if self.active:
                self.active = False
                self._swap.release()

    def __enter__(self) -> Replacement:
        if not self.active:
            raise RuntimeError("this replacement has been undone: call replace_stock() again")
        return self

    def __exit__(self, *_: object) -> None:
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
    def __init__(self, stock: dict[str, ModuleType], mirror: dict[str, ModuleType]) -> None:
        self.holders = 0
        self.stock = {name: module for name, module in stock.items() if name in mirror}
        self.own = {name: _own_names(module, mirror[name]) for name, module in self.stock.items()}
        self.replaced = {f"{STOCK}.{name}".rstrip("."): dict(own) for name, own in self.own.items()}
        self.kept = {
            module.__name__: lacking
            for name, module in stock.items()
            if (lacking := tuple(sorted(_defined(module) - self.own.get(name, {}).keys())))
        }
        self.stand_ins = {name: _StandInModule(module, self.own[name]) for name, module in self.stock.items()}
        self.entries: list[tuple[str, _StandInModule, ModuleType]] = []
        self.rebound: list[_BoundName] = []
        self.left: list[_BoundName] = []
        self.records: list[type] = []
        self.guard = _ReloadGuard()

    def begin(self) -> None:
        modules = {id(module): (module, self.stand_ins[name]) for name, module in self.stock.items()}
        # Submodules are also attributes of the package.
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
        for kind, _ in values.values():
            if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, Enum)):
                copyreg.pickle(kind, _reduce)
                self.records.append(kind)
        sys.meta_path.insert(0, self.guard)
        calls = {key for key, (theirs, _) in values.items() if _is_call(theirs)}
        bases = {key for key, (theirs, _) in values.items() if isinstance(theirs, type) and not _is_protocol(theirs)}
        self.rebound, self.left = _rebind(modules | values, frozenset(calls | modules.keys()), frozenset(bases))

    def release(self) -> None:
        """Drop one `Replacement`; the last one undoes the replacement."""
        self.holders -= 1
        if not self.holders:
            _running.clear()
            self.end()

    def end(self) -> None:
        """Restore stock's modules and names, also in modules imported during the replacement."""
        for key, stand_in, module in self.entries:
            if sys.modules.get(key) is stand_in:
                sys.modules[key] = module
        if vars(torch.distributed).get("checkpoint") is self.stand_ins[""]:
            vars(torch.distributed)["checkpoint"] = self.stock[""]
        with suppress(ValueError):
            sys.meta_path.remove(self.guard)
        for kind in self.records:
            copyreg.dispatch_table.pop(kind, None)
        for own in self.own.values():
            own.clear()
        for each in reversed(self.rebound):
            each.restore()
        back = {id(stand_in): (stand_in, self.stock[name]) for name, stand_in in self.stand_ins.items()}
        for each in _bound_names(back, with_torch=True):
            each.bind()
        for stand_in in self.stand_ins.values():
            _take_back(stand_in)


def replace_stock(*, any_torch: bool = False) -> Replacement:
    """Replace `torch.distributed.checkpoint` by our modules in this process, for code that cannot be edited.

    ```python
    import torch
    import torch.distributed.checkpoint as dcp

    from dcp_bridge import replace_stock

    with replace_stock():
        dcp.save({"weight": torch.ones(3)}, checkpoint_id="step-1")  # a manifest, checksums, atomic
    ```

    Stock's modules and loaded modules' globals then return our objects, except names that we lack; stock's own code
    uses only stock's objects. `Replacement.undo` or the end of the `with` block ends a replacement; the end of the last
    one restores stock. Forked processes inherit it; others need `DCP_REPLACE_STOCK` (see the README).

    Args:
        any_torch: Whether to accept untested versions of torch.

    Raises:
        DcpError: The replacement was not tested with this version of torch.
        PluginNotFoundError: `dcp-all`, or a package that it needs, is not installed.

    Ranks: one; not collective, but call it on all ranks with the same arguments.
    """
    if not any_torch:
        _check_torch(torch.__version__)
    # Import outside the lock, because imports wait for other threads' imports.
    stock, mirror = _import_stock(), _import_mirror()
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
    """Return stock's original module, even during a replacement.

    ```python
    from dcp_bridge import original_stock, replace_stock

    with replace_stock():
        assert original_stock().save.__module__ == "torch.distributed.checkpoint.state_dict_saver"
    ```

    Args:
        name: Submodule, such as "state_dict"; empty for the package.
    """
    return _original(importlib.import_module(f"{STOCK}.{name}".rstrip(".")))


def _check_torch(version: str) -> None:
    """Raise DcpError if the replacement was not tested with a version of torch."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not _OLDEST <= (int(found[1]), int(found[2])) <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise DcpError(
            f"torch is {version}, and replacing {STOCK} was tested with {oldest} to {newest}: install one of these or "
            "a newer dcp-bridge. To try it with this one, pass replace_stock(any_torch=True), or "
            "add --any-torch to `python -m dcp_bridge`"
        )


def _import_stock() -> dict[str, ModuleType]:
    """Import stock and its submodules, before a replacement; return name → module, "" for the package."""
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


def _import_mirror() -> dict[str, ModuleType]:
    """Import our modules that mirror stock's; return name → module, "" for the package."""
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


def _own_names(stock: ModuleType, mirror: ModuleType) -> dict[str, Any]:
    """Return name → our object for names in both modules, except submodules."""
    offered = getattr(mirror, "__all__", vars(mirror))
    shared = [name for name in offered if name in vars(stock) and not name.startswith("__")]
    found = {name: getattr(mirror, name) for name in shared}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def _original(module: ModuleType) -> ModuleType:
    found: ModuleType = vars(module)["__stock__"] if isinstance(module, _StandInModule) else module
    return found


def _defined(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
    }


def _is_defined_by_stock(value: Any) -> bool:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    return f"{getattr(value, '__module__', '')}.".startswith(f"{STOCK}.")


def _reduce(record: Any) -> Any:
    frame = sys._getframe(1)  # noqa: SLF001 - the only way to find the caller
    if _gets_stock(frame) or frame.f_globals.get("__name__") == "copy":
        return record.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
    return pickle.loads, (pickle.dumps(record),)


def _is_call(value: Any) -> bool:
    return inspect.isroutine(value) and value.__module__.removeprefix(f"{STOCK}.") in _CALLS


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _some(names: tuple[str, ...] | list[str]) -> str:
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


# Torch's own modules work with its records, and so does the bridge.
_SPARED = ("torch.", "dcp_bridge.")


@dataclass(frozen=True, slots=True)
class _BoundName:
    module: str
    name: str
    namespace: dict[str, Any]
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"

    def bind(self) -> None:
        """Set the new value, unless other code changed it."""
        if self.namespace.get(self.name) is self.old:
            self.namespace[self.name] = self.new

    def restore(self) -> None:
        if self.namespace.get(self.name) is self.new:
            self.namespace[self.name] = self.old


def loaded_modules(*, with_torch: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and `__dict__` of loaded modules without loading lazy ones; torch's and ours only `with_torch`."""
    for name, module in list(sys.modules.items()):
        if issubclass(type(module), ModuleType) and (with_torch or not f"{name}.".startswith(_SPARED)):
            yield name, vars(module)


def _bound_names(swaps: Mapping[int, tuple[Any, Any]], *, with_torch: bool = False) -> list[_BoundName]:
    return [
        _BoundName(module, name, namespace, *swaps[id(value)])
        for module, namespace in loaded_modules(with_torch=with_torch)
        for name, value in list(namespace.items())
        if id(value) in swaps and not name.startswith("__")
    ]


def _is_derived_from(namespace: Mapping[str, Any], classes: frozenset[int]) -> bool:
    return any(
        isinstance(value, type)
        and value.__module__ == namespace.get("__name__")
        and any(id(base) in classes for base in value.__mro__[1:])
        for value in list(namespace.values())
    )


def _rebind(
    swaps: Mapping[int, tuple[Any, Any]], calls: frozenset[int], bases: frozenset[int]
) -> tuple[list[_BoundName], list[_BoundName]]:
    """Replace stock's objects in loaded modules' globals; return the replaced and the unchanged globals.

    A module that derives from a class of stock keeps stock's classes: only `calls` are replaced there.
    """
    swapped, left = [], []
    derived: dict[str, bool] = {}
    for each in _bound_names(swaps):
        if each.module not in derived:
            derived[each.module] = _is_derived_from(each.namespace, bases)
        if derived[each.module] and id(each.old) not in calls:
            left.append(each)
        else:
            each.bind()
            swapped.append(each)
    return swapped, left


# Code of these modules gets only stock's objects: it looks up stock's own classes to pickle and create them.
_STOCKS_OWN = ("torch.distributed.checkpoint.", "dcp_bridge.")
# This code never names stock: its look-ups come from pickles of stock's objects that users passed.
_PICKLING = ("dcp_async.", "dcp_core.", "dcp_ranks.")


class _StandInModule(ModuleType):
    """Module with our objects under the names in `own`, and stock's under all others and for code of stock."""

    def __init__(self, stock: ModuleType, own: dict[str, Any]) -> None:
        super().__init__(stock.__name__, stock.__doc__)
        for name in ("__file__", "__path__", "__package__", "__spec__", "__loader__", "__cached__"):
            if name in vars(stock):
                vars(self)[name] = vars(stock)[name]
        vars(self).update(__stock__=stock, __own__=own, __taken__={})

    def __getattr__(self, name: str) -> Any:
        fields = vars(self)
        stock, own = fields["__stock__"], fields["__own__"]
        if name == "__all__" and name not in vars(stock):  # `import *` would read our __dict__
            return [each for each in vars(stock) if not each.startswith("_")]
        theirs = getattr(stock, name)
        if name not in own:
            return theirs
        frame = sys._getframe(1)  # noqa: SLF001 - the only way to find the caller
        if _gets_stock(frame):
            return theirs
        ours = own[name]
        if frame.f_code.co_name == "<module>":  # `from … import name` in a module, which keeps the object
            namespace = frame.f_globals
            fields["__taken__"][id(namespace), id(ours)] = (namespace, ours, theirs)
        return ours

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle pickles modules."""
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["__stock__"])


class _ReloadGuard:
    """Import hook that refuses to reload a stand-in, which would overwrite it with stock's names."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        del path
        if isinstance(target, _StandInModule):
            text = f"{name} is replaced and cannot be reloaded: undo the replacement first"
            raise ImportError(text, name=name)  # noqa: TRY004 - like any failed reload


def _take_back(stand_in: _StandInModule) -> None:
    taken = vars(stand_in)["__taken__"]
    for namespace, ours, theirs in list(taken.values()):
        for name in [name for name, value in list(namespace.items()) if value is ours]:
            namespace[name] = theirs
    taken.clear()


def _gets_stock(frame: FrameType) -> bool:
    if _module(frame).startswith(_PICKLING):
        return True
    caller: FrameType | None = frame
    while caller is not None:
        if _module(caller).startswith(_STOCKS_OWN):
            return True
        caller = caller.f_back
    return False


def _module(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}."
