"""Calls on stock's modules and on ours: their order, attributes, ids, errors and threads are the same.

Each table lists what differs on purpose, and a row that is not needed any more fails.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_all

pytestmark = pytest.mark.filterwarnings("ignore")  # PyTorch's, that there is no process group

STOCK = stock.__name__
MODULES = (
    *("api", "default_planner", "filesystem", "hf_storage", "metadata", "optimizer", "planner", "quantized_hf_storage"),
    *("staging", "state_dict", "state_dict_loader", "state_dict_saver", "stateful", "storage", "utils"),
)
# Attributes of instances that ours lack: they belong to stock's own steps of reading and writing.
_READERS = {"transforms", "rank", "use_collectives"}
_OF_FILES = {"overwrite", "per_thread_copy_ahead", "serialization_format", "single_file_per_rank", "sync_files"}
LACKING = {
    "FileSystemReader": _READERS,
    "HuggingFaceStorageReader": _READERS,
    "QuantizedHuggingFaceStorageReader": _READERS,
    # A class of its own here, not a subclass of the writer of files.
    "HuggingFaceStorageWriter": {*_OF_FILES, "consolidated_output_path", "transforms", "rank", "use_collectives"},
}
# Values that differ: (class, attribute) → why.
OTHER_VALUE = {
    ("FileSystemWriter", "thread_count"): "the cores of this process",
    ("FileSystemWriter", "rank"): "the rank from the start",
    ("HuggingFaceStorageWriter", "metadata_path"): "with the folder",
}


def both(module: str, name: str) -> tuple[Any, Any]:
    return getattr(importlib.import_module(f"{STOCK}.{module}"), name), getattr(
        importlib.import_module(f"dcp_all.{module}"), name
    )


def classes(base: type) -> list[tuple[str, str]]:
    """Module and name of the classes, derived from `base`, that a module of stock defines and ours has."""
    return [
        (module, name)
        for module in MODULES
        for name, value in vars(importlib.import_module(f"{STOCK}.{module}")).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value.__module__ == f"{STOCK}.{module}"
        and hasattr(importlib.import_module(f"dcp_all.{module}"), name)
    ]


FAILURES: dict[str, Callable[[], Any]] = {
    "none": dict,
    "text": lambda: {0: (ValueError("a"), "Traceback …")},
    "frames": lambda: {1: (OSError(28, "full"), traceback.extract_stack()), 0: (ValueError("a"), None)},
    "stock's own": lambda: {0: importlib.import_module(f"{STOCK}.api")._wrap_exception(ValueError("a"))},
}


@pytest.mark.parametrize("failures", FAILURES)
@pytest.mark.parametrize(("module", "name"), classes(BaseException))
def test_exceptions_take_what_stock_s_take(module: str, name: str, failures: str) -> None:
    """Megatron-Core and NVRx raise `CheckpointException` themselves, with failures as stock's helper wraps them."""
    given = FAILURES[failures]()
    theirs, ours = (kind("write", given) for kind in both(module, name))
    assert ours.args[0] == theirs.args[0] == "write"
    assert len(ours.args) == len(theirs.args)
    assert ours.failures.keys() == theirs.failures.keys()
    assert [error for error, _ in ours.failures.values()] == [given[rank][0] for rank in sorted(given)]
    for each in (ours, pickle.loads(pickle.dumps(ours))):
        assert str(each).startswith("write")
        assert all(str(error) in str(each) for error, _ in given.values())


def test_the_walk_finds_exceptions() -> None:
    assert ("api", "CheckpointException") in classes(BaseException)


MADE: dict[str, Callable[[Any, Path], Any]] = {
    "FileSystemWriter": lambda module, path: module.FileSystemWriter(path),
    "FileSystemReader": lambda module, path: module.FileSystemReader(path),
    "DefaultSavePlanner": lambda module, path: module.DefaultSavePlanner(),
    "DefaultLoadPlanner": lambda module, path: module.DefaultLoadPlanner(),
    "HuggingFaceStorageWriter": lambda module, path: module.HuggingFaceStorageWriter(str(path)),
    "HuggingFaceStorageReader": lambda module, path: module.HuggingFaceStorageReader(str(path)),
    "QuantizedHuggingFaceStorageReader": lambda module, path: module.QuantizedHuggingFaceStorageReader(str(path)),
    "CheckpointException": lambda module, path: module.CheckpointException("write", {}),
}


# Relations of stock's classes that ours lack, as `migrate-from-stock.md` says: these storages are classes of their own.
OTHER_BASES = {
    *(
        (f"{kind}Writer", base)
        for kind in ("Fsspec", "HuggingFaceStorage")
        for base in ("FileSystemWriter", "_FileSystemWriter")
    ),
    *(
        (f"{kind}Reader", "FileSystemReader")
        for kind in ("Fsspec", "HuggingFaceStorage", "QuantizedHuggingFaceStorage")
    ),
}


def test_classes_are_derived_as_stock_s() -> None:
    """What `isinstance` and `except` of frameworks find."""
    found = [
        *dict.fromkeys(
            [*classes(object), ("_fsspec_filesystem", "FsspecWriter"), ("_fsspec_filesystem", "FsspecReader")]
        )
    ]
    pairs = {name: both(module, name) for module, name in found}
    lacking = set()
    for name, (theirs, ours) in pairs.items():
        for other, (their_base, our_base) in pairs.items():
            try:
                expected = issubclass(theirs, their_base)
            except TypeError:  # a protocol with attributes
                continue
            if expected and not issubclass(ours, our_base):
                lacking.add((name, other))
    assert lacking == OTHER_BASES


@pytest.mark.parametrize(("module", "name"), [*classes(object)])
def test_subclasses_must_override_the_same_methods(module: str, name: str) -> None:
    theirs, ours = (getattr(kind, "__abstractmethods__", frozenset()) for kind in both(module, name))
    assert ours == theirs


def public(value: object) -> set[str]:
    return {name for name in dir(value) if not name.startswith("_")}


@pytest.mark.parametrize("kind", MADE)
def test_instances_have_stock_s_attributes_and_defaults(kind: str, tmp_path: Path) -> None:
    theirs, ours = (MADE[kind](module, tmp_path) for module in (stock, dcp_all))
    assert public(theirs) - public(ours) == LACKING.get(kind, set()) & public(theirs)
    for name in public(theirs) & public(ours):
        one, other = getattr(theirs, name), getattr(ours, name)
        if isinstance(one, bool | int | str | dict | list | tuple | None) and not name.endswith("_id"):
            assert (one == other) is ((kind, name) not in OTHER_VALUE), (name, one, other)


@pytest.mark.parametrize("kind", ["FileSystemWriter", "FileSystemReader"])
@pytest.mark.parametrize("side", [STOCK, "dcp_all"])
def test_reset_changes_id_and_path(side: str, kind: str, tmp_path: Path) -> None:
    storage = getattr(importlib.import_module(side), kind)(tmp_path)
    name = "save_id" if kind.endswith("Writer") else "load_id"
    seen = {getattr(storage, name)}
    storage.reset()
    assert (Path(storage.path), str(storage.checkpoint_id)) == (tmp_path, str(tmp_path))
    seen.add(getattr(storage, name))
    storage.reset(tmp_path / "b")
    assert (Path(storage.path), str(storage.checkpoint_id)) == (tmp_path / "b", str(tmp_path / "b"))
    seen.add(getattr(storage, name))
    assert len(seen) == 3
    if kind.endswith("Reader"):
        assert storage.storage_data == {}


def recorded(base: type, calls: list[tuple[str, str, Any]], depth: list[int]) -> type:
    """A class derived from `base` that notes calls of its public methods from outside, and `is_coordinator`."""

    def method(name: str, function: Any) -> Any:
        @functools.wraps(function)  # stock looks at the parameters
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not depth[0]:
                given = inspect.signature(function).bind(self, *args, **kwargs).arguments
                calls.append((base.__name__, name, given.get("is_coordinator")))
            depth[0] += 1
            try:
                return function(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    found = {name: inspect.getattr_static(base, name) for name in public(base)}
    return type(base.__name__, (base,), {n: method(n, f) for n, f in found.items() if inspect.isfunction(f)})


def save(module: Any, parts: Callable[[str], Any], folder: Path) -> None:
    module.save(state(), storage_writer=parts("FileSystemWriter")(folder), planner=parts("DefaultSavePlanner")())


def save_by_id(module: Any, parts: Callable[[str], Any], folder: Path) -> None:
    writer = parts("FileSystemWriter")(folder / "other")
    module.save(state(), storage_writer=writer, planner=parts("DefaultSavePlanner")(), checkpoint_id=folder)


def save_in_a_thread(module: Any, parts: Callable[[str], Any], folder: Path) -> None:
    writer, planner = parts("FileSystemWriter")(folder), parts("DefaultSavePlanner")()
    module.async_save(state(), storage_writer=writer, planner=planner).result()


def load(module: Any, parts: Callable[[str], Any], folder: Path) -> None:
    stock.save(state(), checkpoint_id=folder)
    module.load(state(), storage_reader=parts("FileSystemReader")(folder), planner=parts("DefaultLoadPlanner")())


def state() -> dict[str, Any]:
    return {"w": torch.arange(4.0), "n": {"step": 3}}


CALLS = {"save": save, "save by id": save_by_id, "thread": save_in_a_thread, "load": load}


@pytest.mark.parametrize("call", CALLS)
def test_methods_are_called_in_stock_s_order(call: str, tmp_path: Path) -> None:
    orders = {}
    for module in (stock, dcp_all):
        calls: list[tuple[str, str, Any]] = []
        depth = [0]
        CALLS[call](
            module,
            lambda name, module=module, calls=calls, depth=depth: recorded(getattr(module, name), calls, depth),
            tmp_path / module.__name__,
        )
        known = {(kind, name) for kind, name, _ in calls if hasattr(getattr(stock, kind), name)}
        orders[module] = [each for each in calls if each[:2] in known]
    assert orders[dcp_all] == orders[stock]
    assert len(orders[stock]) > 5


@pytest.fixture
def threads() -> Callable[[], set[str]]:
    before = set(threading.enumerate())
    return lambda: {thread.name for thread in threading.enumerate() if thread not in before}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("side", [STOCK, "dcp_all"])
def test_no_thread_stays(side: str, call: str, tmp_path: Path, threads: Callable[[], set[str]]) -> None:
    module = importlib.import_module(side)
    CALLS[call](module, lambda name: getattr(module, name), tmp_path)
    # The thread that saves stays for the next save, and ends with the process.
    allowed = {"dcp-thread-saver_0"} if (side, call) == ("dcp_all", "thread") else set()
    assert threads() <= allowed
