"""`python -m dcp_bridge [options] script.py args…`: run a program in which this project replaces stock.

The program is `__main__` until the process ends, as if Python had started it.
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import logging
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_STOCK = "torch.distributed.checkpoint"
_EXAMPLES = """\
examples:
  python -m dcp_bridge train.py --lr 1e-3
  python -m dcp_bridge -m my_project.train --lr 1e-3
  torchrun --nproc-per-node 4 -m dcp_bridge train.py --lr 1e-3

Processes that the program forks have the replacement, too. Processes that it spawns call replace_stock() themselves.
"""


def main(arguments: list[str]) -> None:
    """Run a program with stock replaced; `arguments` exclude the command's name."""
    parser = argparse.ArgumentParser(
        prog="python -m dcp_bridge",
        description="Run a program with torch.distributed.checkpoint replaced by dcp_all.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--any-torch", action="store_true", help="try it with an untested version of torch")
    parser.add_argument("-v", "--verbose", action="store_true", help="say on stderr what was replaced")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is the name of a module")
    parser.add_argument("program", metavar="PROGRAM", help="path of a script, or name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="…", help="the program's own arguments")
    chosen = parser.parse_args(arguments)
    if chosen.verbose:
        logger = logging.getLogger().getChild("dcp_bridge")  # only adds a handler
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    _replace_at_import(any_torch=chosen.any_torch)
    sys.argv = [chosen.program, *chosen.arguments]
    if chosen.module:
        _run(*_of_module(parser, chosen.program))
        return
    path = Path(chosen.program).absolute()
    if not chosen.program or not path.exists():
        parser.error(f"there is no script {chosen.program}; a module needs -m")
    if path.is_dir() and not any(path.glob("__main__.py*")):
        parser.error(f"the directory {chosen.program} has no __main__.py")
    if path.is_file() and path.suffix in ("", ".py"):
        _run(*_of_script(path))
    else:  # a directory or archive with a __main__.py, or compiled code
        runpy.run_path(chosen.program, {"__builtins__": builtins}, run_name="__main__")


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
        _replace_now(any_torch=self._finder.any_torch)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)


def _replace_now(*, any_torch: bool) -> None:
    from dcp_bridge.replacement.replacement import replace_stock  # noqa: PLC0415 - it imports torch

    replace_stock(any_torch=any_torch)


def _replace_at_import(*, any_torch: bool) -> None:
    """Replace stock at its first import, or now if already imported, for the rest of the process.

    Unless `any_torch`, the import of stock raises `DcpError` for untested versions of torch.
    """
    if _STOCK in sys.modules:
        _replace_now(any_torch=any_torch)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(any_torch=any_torch))


def _of_script(path: Path) -> tuple[CodeType, ModuleType]:
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11: adds no directory to the path
        sys.path[0] = str(path.resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", str(path))
    module = ModuleType("__main__")
    vars(module).update(__file__=str(path), __loader__=loader, __cached__=None, __builtins__=builtins)
    return loader.source_to_code(path.read_bytes(), str(path)), module


def _of_module(parser: argparse.ArgumentParser, name: str) -> tuple[CodeType, ModuleType]:
    if name.startswith("."):
        parser.error(f"the name of a module must be absolute, and {name} is relative")
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # not the requested module, but one that it imports
            raise
        spec = None
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if isinstance(loader, importlib.machinery.SourceFileLoader) and spec else None
    if spec is None or code is None:
        parser.error(f"there is no module {name} that could be run")
    module = ModuleType("__main__")
    vars(module).update(
        __file__=spec.origin, __loader__=loader, __cached__=spec.cached, __spec__=spec, __package__=spec.parent
    )
    vars(module)["__builtins__"] = builtins
    sys.argv[0] = str(spec.origin)
    return code, module


def _run(code: CodeType, module: ModuleType) -> None:
    # Threads, exit handlers and pickles look up `__main__` until the process ends.
    sys.modules["__main__"] = module
    exec(code, vars(module))  # noqa: S102 - running the user's program is what this command is for


if __name__ == "__main__":
    main(sys.argv[1:])
