"""What a selection of packages must be able to do, as far as it is there, in a process that can import nothing else."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["run"]

# What is needed for a step, beside the core; a step runs where all of it is there.
_STEPS: list[tuple[tuple[str, ...], Callable[[str], None]]] = []

_OFFERS = {
    "dcp-fs": ("storage", "file"),
    "dcp-object": ("storage", "s3"),
    "dcp-fsspec": ("storage", "memory"),
    "dcp-transforms": ("transforms", "block.planes"),
    "dcp-state": ("state_adapters", "ddp"),
    "dcp-format": ("converters", "safetensors"),
}


def run(names: tuple[str, ...], known: tuple[str, ...], folder: str) -> None:
    """Import the packages, check that no other one can be, use their hooks, and save and load with what there is.

    Args:
        names: The packages that are there.
        known: All packages there are.
        folder: Empty.
    """
    for name in known:
        module = name.replace("-", "_")
        if name in names:
            found = importlib.import_module(module)
            assert all(hasattr(found, each) for each in found.__all__), module
        else:
            assert _missing(module), f"{module} can be imported, and is not there"
    os.chdir(folder)
    if "dcp-core" in names:
        _hooks(names)
    for needed, step in _STEPS:
        if set(needed) <= set(names):
            step(folder)


def _missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return True
    return False


def _hooks(names: tuple[str, ...]) -> None:
    from dcp_core import DcpError, plugins

    broken = [str(info) + str(info.error) for info in plugins.list() if info.error is not None]
    assert broken == [], broken
    get: dict[str, Callable[[str], Any]] = {
        "storage": lambda name: plugins.storage_for(f"{name}://x").load_writer(),
        "transforms": plugins.transform,
        "state_adapters": plugins.state_adapter,
        "converters": plugins.converter,
    }
    for table, find in get.items():
        for name in plugins.names(table):
            assert find(name) is not None
    for package, (table, name) in _OFFERS.items():
        if package in names:
            assert name in plugins.names(table), (package, table)
        elif table == "storage" and "dcp-fsspec" in names:
            assert get[table](name) is not None  # fsspec stands in for every scheme that it knows
        elif name not in plugins.names(table):
            try:
                get[table](name)
            except DcpError as error:
                assert f"install {package}" in str(error), error
            else:
                raise AssertionError(f"{name} was found without {package}")


def _step(*needed: str) -> Callable[[Callable[[str], None]], Callable[[str], None]]:
    def take(step: Callable[[str], None]) -> Callable[[str], None]:
        _STEPS.append((needed, step))
        return step

    return take


def _state(value: float) -> dict[str, Any]:
    import torch

    return {"weight": torch.full((300,), value), "step": int(value)}


def _check(state: dict[str, Any]) -> None:
    assert state["step"] == 3
    assert bool((state["weight"] == 3).all())


@_step("dcp-manifest")
def _find_checkpoints(folder: str) -> None:
    from dcp_manifest import LocalFolder, checkpoints_below

    assert [*checkpoints_below(LocalFolder(folder))] == []


@_step("dcp-base")
def _find_plugins(folder: str) -> None:
    from dcp_base import PluginLoadError, installed

    for info in installed.list():
        assert info.error is None, info
        try:
            installed.import_offers(info)
        except PluginLoadError as error:  # an offer for a package of ours that is not installed, such as a storage
            assert isinstance(error.__cause__, ModuleNotFoundError), error
            assert (error.__cause__.name or "").startswith("dcp_"), error


@_step("dcp-io")
def _store_bytes(folder: str) -> None:
    from dcp_io import LocalStore

    store = LocalStore(f"{folder}/store")
    store.make()
    store.publish("name", b"bytes")
    assert store.read("name") == b"bytes"


@_step("dcp-ranks")
def _agree(folder: str) -> None:
    from dcp_ranks import make_coordinator

    with make_coordinator(no_dist=True) as ranks:
        assert ranks.all_reduce("count", lambda: 3, sum) == 3


@_step("dcp-data")
def _continue_an_epoch(folder: str) -> None:
    from dcp_data import ResumableSampler

    data = range(20)
    first, second = (ResumableSampler(data, 4, rank=0, world_size=1) for _ in range(2))
    taken = next(iter(first.loader(data))).tolist()
    second.load_state_dict(first.state_dict())
    taken += [each for batch in second.loader(data) for each in batch.tolist()]
    assert sorted(taken) == [*data]


@_step("dcp-core")
def _save_and_load_by_own_storages(folder: str) -> None:
    from dcp_core import load, save

    writer, reader = _storages(f"{folder}/here")
    save(_state(3), storage_writer=writer)
    state = _state(0)
    load(state, storage_reader=reader)
    _check(state)


def _storages(folder: str) -> tuple[Any, Any]:
    """A writer and a reader that are made of the core alone."""
    from dcp_core import ByteStorageReader, ByteStorageWriter
    from dcp_io import LocalStore, StoreBackend

    class Opening:
        def _open(self, checkpoint_id: Any) -> StoreBackend:
            return StoreBackend(LocalStore(checkpoint_id))

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
            return True

    class Writer(Opening, ByteStorageWriter): ...

    class Reader(Opening, ByteStorageReader): ...

    return Writer(folder), Reader(folder)


@_step("dcp-core", "dcp-fs")
def _save_and_load_files(folder: str) -> None:
    from dcp_core import load, save

    save(_state(3), checkpoint_id=f"{folder}/step-3")
    state = _state(0)
    load(state, checkpoint_id=f"{folder}/step-3")
    _check(state)


@_step("dcp-core", "dcp-fsspec")
def _save_and_load_by_fsspec(folder: str) -> None:
    from dcp_core import load, save

    save(_state(3), checkpoint_id="memory://step-3")
    state = _state(0)
    load(state, checkpoint_id="memory://step-3")
    _check(state)


@_step("dcp-fs", "dcp-transforms")
def _compress(folder: str) -> None:
    from dcp_core import load, save
    from dcp_fs import FileSystemWriter

    save(_state(3), storage_writer=FileSystemWriter(f"{folder}/compressed", compression="auto"))
    state = _state(0)
    load(state, checkpoint_id=f"{folder}/compressed")
    _check(state)


@_step("dcp-async")
def _save_in_a_thread(folder: str) -> None:
    from dcp_async import AsyncSaver
    from dcp_core import load

    writer, reader = _storages(f"{folder}/thread")
    with AsyncSaver("thread") as saver:
        saver.save(_state(3), storage_writer=writer)
    state = _state(0)
    load(state, storage_reader=reader)
    _check(state)


@_step("dcp-state")
def _name_parameters(folder: str) -> None:
    import torch

    from dcp_state import get_model_state_dict

    assert sorted(get_model_state_dict(torch.nn.Linear(2, 2))) == ["bias", "weight"]


@_step("dcp-fs", "dcp-format")
def _convert(folder: str) -> None:
    import torch

    from dcp_core import save
    from dcp_format import convert

    save({"weight": torch.ones(3)}, checkpoint_id=f"{folder}/tensors")
    convert(f"{folder}/tensors", f"{folder}/tensors.safetensors")
    convert(f"{folder}/tensors.safetensors", f"{folder}/tensors.pt")
    assert torch.equal(torch.load(f"{folder}/tensors.pt", weights_only=True)["weight"], torch.ones(3))


@_step("dcp-fs", "dcp-manager")
def _keep_two(folder: str) -> None:
    from dcp_manager import CheckpointManager, EverySteps, KeepLast

    with CheckpointManager(f"{folder}/run", save_policy=EverySteps(1), keep_policy=KeepLast(2)) as manager:
        for step in range(1, 4):
            manager.maybe_save(step, _state(step))
        assert [record.step for record in manager.checkpoints()] == [2, 3]


@_step("dcp-inspect")
def _list(folder: str) -> None:
    from dcp_inspect.cli import run as dcp

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert dcp(["plugins"]) == 0
    assert printed.getvalue()


@_step("dcp-fs", "dcp-inspect")
def _verify(folder: str) -> None:
    from dcp_inspect.cli import run as dcp

    with contextlib.redirect_stdout(io.StringIO()):
        assert dcp(["verify", f"{folder}/step-3"]) == 0


@_step("dcp-bridge")
def _cross_the_bridge(folder: str) -> None:
    import torch.distributed.checkpoint as stock

    from dcp_core import load, save

    save(_state(3), storage_writer=stock.FileSystemWriter(f"{folder}/stock"))
    state = _state(0)
    load(state, storage_reader=stock.FileSystemReader(f"{folder}/stock"))
    _check(state)


@_step("dcp-all")
def _under_one_import(folder: str) -> None:
    import dcp_all as dcp

    dcp.save(_state(3), checkpoint_id=f"{folder}/all")
    state = _state(0)
    dcp.load(state, checkpoint_id=f"{folder}/all")
    _check(state)
    assert "torch.distributed.checkpoint" not in sys.modules or "dcp_bridge" in sys.modules
