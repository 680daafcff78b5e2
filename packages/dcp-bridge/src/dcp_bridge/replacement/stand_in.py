"""`StandInModule`: the module that is imported instead of `torch.distributed.checkpoint`, or of a submodule of it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType
from typing import Any

__all__ = ["ReloadGuard", "StandInModule", "take_back"]

# Within a call of one of these everything is stock's: its own classes are pickled and made by looking names up here.
_STOCKS_OWN = ("torch.distributed.checkpoint.", "dcp_bridge.")
# Their own code never names stock: a lookup from there is a pickle's, of an object of stock that a call was given.
_PICKLING = ("dcp_async.", "dcp_core.", "dcp_ranks.")


class StandInModule(ModuleType):
    """Module with our objects under the names in `own`, and stock's objects under all other names of `stock`.

    Args:
        stock: Module of stock that is replaced, and stays unchanged.
        own: Name → our object. The end of the replacement empties this mapping; all names then give stock's objects.

    Code of stock and of `dcp_bridge`, and code that they call, gets stock's objects: stock's functions must find
    stock's own classes by name. Names that stock lacks are missing here, too.
    """

    def __init__(self, stock: ModuleType, own: dict[str, Any]) -> None:
        super().__init__(stock.__name__, stock.__doc__)
        for name in ("__file__", "__path__", "__package__", "__spec__", "__loader__", "__cached__"):
            if name in vars(stock):
                vars(self)[name] = vars(stock)[name]
        vars(self).update(__stock__=stock, __own__=own, __taken__={})

    def __getattr__(self, name: str) -> Any:
        fields = vars(self)
        stock, own = fields["__stock__"], fields["__own__"]
        if name == "__all__" and name not in vars(stock):  # for `import *`, which would look into our __dict__
            return [each for each in vars(stock) if not each.startswith("_")]
        theirs = getattr(stock, name)
        if name not in own:
            return theirs
        frame = sys._getframe(1)  # noqa: SLF001 - the one way to know who asks
        if _is_within_stock(frame) or _module(frame).startswith(_PICKLING):
            return theirs
        ours = own[name]
        if frame.f_code.co_name == "<module>":  # `from … import name`: a module that keeps it
            namespace = frame.f_globals
            fields["__taken__"][id(namespace), id(ours)] = (namespace, ours, theirs)
        return ours

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name, as cloudpickle does with modules that a function uses: whoever loads it imports its own."""
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return dir(vars(self)["__stock__"])


class ReloadGuard:
    """Import hook that refuses to reload a stand-in, in which a reload would put all of stock's names."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        """Find nothing; raises ImportError for a reload of a stand-in."""
        del path
        if isinstance(target, StandInModule):
            text = f"{name} is replaced and cannot be reloaded: undo the replacement first"
            raise ImportError(text, name=name)  # noqa: TRY004 - what a reload that fails raises


def take_back(stand_in: StandInModule) -> None:
    """Restore stock's objects in the globals of modules that have imported names from a stand-in."""
    taken = vars(stand_in)["__taken__"]
    for namespace, ours, theirs in list(taken.values()):
        for name in [name for name, value in list(namespace.items()) if value is ours]:
            namespace[name] = theirs
    taken.clear()


def _is_within_stock(frame: FrameType | None) -> bool:
    while frame is not None:
        if _module(frame).startswith(_STOCKS_OWN):
            return True
        frame = frame.f_back
    return False


def _module(frame: FrameType) -> str:
    """Return the name of the module whose code a frame runs, with a dot at its end."""
    return f"{frame.f_globals.get('__name__')}."
