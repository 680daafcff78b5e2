"""The mirror is whole: every public name of stock is here, or on a list that says which later part brings it.

Stock's modules are walked as they are installed, so a name that a newer torch adds shows up here first.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

import dcp_all

pytestmark = pytest.mark.newest

STOCK = "torch.distributed.checkpoint"
ROOT = Path(dcp_all.__file__).parent
SOURCES = sorted(path for path in ROOT.rglob("*.py") if path.name != "__main__.py")

# The part that brings the names → module ("" is the package itself) → names that we lack until then.
LATER: dict[str, dict[str, set[str]]] = {
    "replication": {"_pg_transport": {"PGTransport"}},
    # What users of stock do not call: helpers that are public by name only, and what old versions needed.
    "never": {
        "_async_thread_executor": {"save_wrapper"},
        "_dedup_tensors": {"dedup_tensors", "init_logger"},
        "_traverse": {"traverse_state_dict_v_2_3"},
    },
}

# Modules of stock that have no mirror → why.
NOT_MIRRORED: dict[str, str] = {
    "_async_executor": "private: how stock runs asynchronous saves; `AsyncSaver` does here",
    "_async_process_executor": "private: as above",
    "_async_thread_executor": "private: as above",
    "_checkpointer": "private: a class around `save` and `load` that nothing of stock uses",
    "_dedup_tensors": "private: what `_dedup_save_plans` replaced",
    "_hf_utils": "private: keys and helpers of stock's safetensors files",
    "_pg_transport": "moves state dicts between ranks without storage: not there yet, use stock's",
    "_sharded_tensor_utils": "private: nested ShardedTensors are understood by the planners",
    "_storage_utils": "private: `dcp_core.arguments` finds the storage of an id",
    "_version": "private: a switch between stock's own versions",
}
# Why names are not exported → the names, in whatever module.
NOT_EXPORTED: dict[str, set[str]] = {
    "type variables": {"T", "R"},
    "failures hold texts here, which travel between processes, and no StackSummary": {"WRAPPED_EXCEPTION"},
    "profiling of stock's calls; events and logs do that here": {"ENABLE_PROFILE"},
    "of the layout that stock looks for in optimizer states; boxes are computed here": {"STATE_DICT_2D_LAYOUT"},
    "keys in stock's safetensors files, which the readers and writers know": {
        *("CUSTOM_METADATA_KEY", "DATA_OFFSETS_KEY", "DCP_VERSION_KEY", "DEFAULT_EXTRA_METADATA_KEY", "DTYPE_KEY"),
        *("FORMAT_KEY", "FORMAT_VALUE", "HF_DCP_VERSION", "SAVED_OFFSETS_KEY", "SHAPE_KEY", "SHARDED_DIR_NAME"),
        "SUFFIX",
    },
    "state dicts of versions before 2.4 are read without it": {"traverse_state_dict_v_2_3"},
    "not there yet": {"PGTransport"},
    "how stock looks for packages that do zstd": {"pyzstd", "pyzstd_module_name", "zstandard_module_name"},
    "the modules' own loggers": {"logger"},
}

# Modules that stock has only from torch 2.15 on.
NEWER = {"fsspec_filesystem", "protocol"}

# Parameters of ours that differ: (name, parameter) → why. Everything else is as in stock.
DIFFERENT: dict[tuple[str, str], str] = {
    ("filesystem.FileSystemWriter", "thread_count"): "the cores of this process instead of 1",
    ("default_planner.DefaultSavePlanner", "enable_plan_caching"): "found by content, so that it is safe to have it on",
    ("_fsspec_filesystem.FsspecWriter", "cache_staged_state_dict"): "by keyword alone: it came between others in 2.15",
    ("fsspec_filesystem.FsspecWriter", "cache_staged_state_dict"): "as above",
    ("staging.DefaultStager", "config"): "None stands for StagingOptions(), which is stock's default",
    ("_traverse.traverse_state_dict", "keep_traversing"): "None stands for the function that is stock's default",
}
# Methods of stock's classes that ours do without: class → names.
WITHOUT: dict[str, set[str]] = {
    # A step of its own work, which works differently here.
    "_state_dict_stager.StateDictStager": {"deepcopy_with_tensor_offload"},
}


def _modules() -> Iterator[ModuleType]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module(STOCK)
        yield package
        for found in pkgutil.walk_packages(package.__path__, f"{STOCK}."):
            if found.name.startswith((f"{STOCK}._experimental", f"{STOCK}.examples", f"{STOCK}.test")):
                continue
            try:
                yield importlib.import_module(found.name)
            except ImportError:  # needs a package that is not installed
                continue


def _short(module: ModuleType) -> str:
    return module.__name__.removeprefix(STOCK).lstrip(".")


@functools.cache
def stock_modules() -> dict[str, ModuleType]:
    return {_short(module): module for module in _modules()}


def _public(module: ModuleType) -> set[str]:
    """`__all__`, and what is defined in the module under a name without underscore."""
    names = {name for name in getattr(module, "__all__", ()) if not name.startswith("_")}
    for name, value in vars(module).items():
        own = getattr(value, "__module__", None) == module.__name__
        if not name.startswith("_") and own and (inspect.isclass(value) or inspect.isroutine(value)):
            names.add(name)
    if module.__name__ == STOCK:
        names |= {name for name in vars(module) if not name.startswith("_")}
    return names


def _mirror(short: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"dcp_all.{short}".rstrip("."))
    except ModuleNotFoundError:
        return None


def test_every_public_name_is_here_or_comes_later() -> None:
    lacking = {
        short: names
        for short, module in stock_modules().items()
        if (names := {name for name in _public(module) if not hasattr(_mirror(short), name)})
    }
    listed: dict[str, set[str]] = {}
    for modules in LATER.values():
        for short, names in modules.items():
            listed.setdefault(short, set()).update(names)
    assert lacking == listed


def test_walk_finds_what_everybody_uses() -> None:
    found = {short: _public(module) for short, module in stock_modules().items()}
    assert {"save", "load", "FileSystemWriter", "StorageWriter", "Metadata"} <= found[""]
    assert "DefaultSavePlanner" in found["default_planner"]
    assert "FsspecWriter" in found.get("_fsspec_filesystem", {"FsspecWriter"})


def _callables() -> list[str]:
    """Functions, classes and their public methods that both have, as `module.name` or `module.Class.method`."""
    found: list[str] = []
    for short, module in stock_modules().items():
        for name in sorted(_public(module)) if short else []:
            theirs, ours = getattr(module, name), getattr(_mirror(short), name, None)
            if ours is None or not (inspect.isclass(theirs) or inspect.isroutine(theirs)):
                continue
            found.append(f"{short}.{name}")
            if inspect.isclass(theirs):
                methods = [key for key, value in vars(theirs).items() if not key.startswith("_") and _is_method(value)]
                found += [f"{short}.{name}.{key}" for key in methods]
    return found


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)


def _resolve(root: ModuleType | None, path: list[str]) -> Any:
    return functools.reduce(getattr, path, root)


def _parameters(of: Any) -> dict[str, inspect.Parameter]:
    return {name: each for name, each in inspect.signature(of).parameters.items() if name != "self"}


def _same_default(ours: object, theirs: object) -> bool:
    if isinstance(theirs, enum.Enum):
        return isinstance(ours, enum.Enum) and (ours.name, ours.value) == (theirs.name, theirs.value)
    # The default of a dataclass factory has no value to compare.
    return ours is theirs or ours == theirs or repr(ours) == repr(theirs) == "<factory>"


def _differences(name: str, ours: Any, theirs: Any) -> list[str]:
    """How `ours` cannot be called as `theirs`."""
    mine, other = _parameters(ours), _parameters(theirs)
    told: list[str] = []
    variadic = {each.kind for each in mine.values()}
    for parameter, their in other.items():
        if (name, parameter) in DIFFERENT:
            continue
        my = mine.get(parameter)
        if my is None:
            taken = inspect.Parameter.VAR_KEYWORD in variadic
            told += [] if taken and their.kind in (their.VAR_KEYWORD, their.KEYWORD_ONLY) else [f"no {parameter}"]
        elif not _same_default(my.default, their.default):
            told.append(f"{parameter}={my.default!r}, in stock {their.default!r}")
        elif my.kind is not their.kind and (my.kind, their.kind) != (my.POSITIONAL_OR_KEYWORD, their.KEYWORD_ONLY):
            told.append(f"{parameter} is {my.kind}, in stock {their.kind}")
    positional = [each for each, kind in ((p, p.kind) for p in other.values()) if kind is each.POSITIONAL_OR_KEYWORD]
    expected = [each.name for each in positional if (name, each.name) not in DIFFERENT]
    order = [each for each in mine if each in expected]
    if order != [each for each in expected if each in mine]:
        told.append(f"order {order}")
    for parameter, my in mine.items():
        optional = my.default is not my.empty or my.kind in (my.VAR_KEYWORD, my.VAR_POSITIONAL)
        if parameter not in other and not optional and not any(of == name for of, _ in DIFFERENT):
            told.append(f"{parameter} is required, and unknown to stock")
    return told


@pytest.mark.parametrize("name", _callables())
def test_can_be_called_as_in_stock(name: str) -> None:
    short, *path = name.split(".")
    owner = _resolve(_mirror(short), path[:-1])
    if not hasattr(owner, path[-1]):
        assert path[-1] in WITHOUT.get(".".join([short, *path[:-1]]), ()), f"{name} is missing"
        return
    ours, theirs = getattr(owner, path[-1]), _resolve(stock_modules()[short], path)
    if inspect.isclass(theirs) and issubclass(theirs, enum.Enum):
        assert {each.name: each.value for each in ours} == {each.name: each.value for each in theirs}
        return
    assert _differences(name, ours, theirs) == []


def test_differences_are_real() -> None:
    """The tables hold nothing that is not needed any more."""
    known = set(_callables())
    for name, parameter in DIFFERENT:
        short, *path = name.split(".")
        if parameter == "cache_staged_state_dict" and "fsspec_filesystem" not in stock_modules():
            continue
        assert name in known
        ours, theirs = (_parameters(_resolve(of, path)) for of in (_mirror(short), stock_modules()[short]))
        mine = ours.get(parameter)
        their = theirs[parameter]
        assert mine is None or mine.kind is not their.kind or not _same_default(mine.default, their.default), name
    for name, methods in WITHOUT.items():
        short, *path = name.split(".")
        assert [each for each in methods if hasattr(_resolve(_mirror(short), path), each)] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_hold_re_exports_only(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    # The package's own names are imported on first use: a test of the house compares them with these imports.
    body = _for_type_checkers(tree.body[1:]) if path == ROOT / "__init__.py" else tree.body[1:]
    imported = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    others = [node for node in body if not isinstance(node, ast.ImportFrom)]
    assert all(isinstance(node, ast.Assign) for node in others)
    renamed = [ast.unparse(node.value) for node in others if isinstance(node, ast.Assign)]
    offered = {alias.name for alias in imported if alias.asname == alias.name}  # as type checkers understand it
    assert {alias.name for alias in imported} - offered == {*renamed} - offered
    assert {*renamed} <= {alias.name for alias in imported}


def _for_type_checkers(body: list[ast.stmt]) -> list[ast.stmt]:
    """The re-exports of a package that imports them on first use, as if it imported them at once."""
    (checked,) = (node for node in body if isinstance(node, ast.If))
    assert ast.unparse(checked.test) == "TYPE_CHECKING"
    others = [ast.unparse(node).partition("(")[0] for node in body if node is not checked]
    assert others == [
        "from __future__ import annotations",
        "from typing import TYPE_CHECKING",
        "from dcp_base import import_lazily",
        "__getattr__, __dir__ = import_lazily",
    ]
    return checked.body


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_mirror_has_a_module_of_stock(path: Path) -> None:
    name = path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("__init__").rstrip("/")
    assert name in {*stock_modules(), *NEWER}


@pytest.mark.parametrize("short", sorted(stock_modules()))
def test_every_name_that_can_be_imported_from_a_module_of_stock(short: str) -> None:
    """Beside the names that a module defines: those that it got from other modules of stock, which people import."""
    mirror = _mirror(short)
    if mirror is None:
        assert short in NOT_MIRRORED, f"dcp_all.{short} is missing"
        return
    module = stock_modules()[short]
    names = {name for name in dir(module) if not name.startswith("_") and not _comes_from_elsewhere(module, name)}
    lacking = {name for name in names if not hasattr(mirror, name)}
    assert lacking <= {name for name in lacking if any(name in listed for listed in NOT_EXPORTED.values())}


def test_names_that_are_said_to_be_missing_are() -> None:
    assert {short for short in NOT_MIRRORED if _mirror(short) is not None} == set()
    modules = {short: module for short, module in stock_modules().items() if short}  # the package has a module `logger`
    known = {name for module in modules.values() for name in dir(module)}
    mirrored = {name for short in modules for name in set(dir(modules[short])) & set(dir(_mirror(short) or object()))}
    for why, names in NOT_EXPORTED.items():
        assert names <= known, why
        assert not names & mirrored, why


def _comes_from_elsewhere(module: ModuleType, name: str) -> bool:
    """Whether a name is the standard library's or torch's own, to be imported from there."""
    value = getattr(module, name)
    if inspect.ismodule(value):
        return not value.__name__.startswith(STOCK)
    home = getattr(value, "__module__", None)
    if isinstance(home, str) and not isinstance(value, TypeVar):
        return not home.startswith(STOCK)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            return not node.level and not (node.module or "").startswith(STOCK)
    return False
