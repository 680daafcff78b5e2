"""Traps of accelerators that others fell into; where a guard can be taken out, the test shows that it is needed."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dcp_async import AsyncSaver, DefaultStager, StagingMismatchError
from dcp_async.staging import arenas, copy_state
from dcp_async.staging.placement import Sources
from dcp_core import load, save
from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_core.tensors import devices, tensor_memory
from dcp_core.tensors.devices import CopyStream
from dcp_core.tensors.tensor_memory import TensorPieces
from dcp_io.reading import read_plan
from dcp_state import app_state
from integration_tests.devices import pretend
from integration_tests.kits.memory import MemoryReader, MemoryWriter
from integration_tests.kits.memory_store import OBJECTS

pytestmark = pytest.mark.device
_LARGE = 40_000
_FOLDER = "traps"


@pytest.fixture(autouse=True)
def module(device: str) -> Iterator[Any]:
    if device != pretend.NAME:
        pytest.skip("only the pretend device tells what it was asked to do")
    gc.collect()
    found = torch.get_device_module(device)
    pretend.machine.finish()
    found.empty_cache()
    pretend.machine.contexts.clear()
    yield found
    with found.stream(found.default_stream(0)):
        found.set_device(0)


def nothing(*_: Any) -> None:
    """Take the place of a guard."""


def filled(value: float, *, device: int = 0, size: int = _LARGE) -> torch.Tensor:
    return torch.full((size,), float(value), device=f"{pretend.NAME}:{device}")


@pytest.mark.parametrize("guarded", [True, False])
def test_no_context_on_device_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, guarded: bool) -> None:
    """A trainer that uses device 1 by name, and threads whose current device is 0."""
    if not guarded:
        monkeypatch.setattr(devices, "devices_in_use", lambda _: [])
    state = {"weight": filled(1, device=1)}
    with AsyncSaver("thread") as saver:
        saver.save(state, checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
    save(state, storage_writer=MemoryWriter(_FOLDER))
    load(state, storage_reader=MemoryReader(_FOLDER))
    assert pretend.machine.contexts == ({1} if guarded else {0, 1})


def test_copies_are_pinned_and_asynchronous(tmp_path: Path) -> None:
    pretend.machine.pageable_copies = 0
    state = {"weight": filled(1), "column": filled(2).view(200, 200).t(), "cast": filled(3)}
    with AsyncSaver("thread") as saver:
        saver.save(state, checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
    save(state, storage_writer=MemoryWriter(_FOLDER))
    load({**state, "cast": state["cast"].double()}, storage_reader=MemoryReader(_FOLDER))
    assert pretend.machine.pageable_copies == 0


@pytest.mark.parametrize("shared", ["thread", "process"])
@pytest.mark.parametrize("guarded", [True, False])
def test_close_releases_pinned_memory(
    module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shared: str, *, guarded: bool
) -> None:
    before: dict[int, int] = dict(module.cudart().ranges)
    kept: list[arenas.Arena] = []

    def keep(arena: arenas.Arena) -> None:
        kept.append(arena)

    if not guarded:
        monkeypatch.setattr(arenas.Arena, "_release", keep)
    with AsyncSaver(shared) as saver:
        saver.save({"weight": filled(1)}, checkpoint_id=tmp_path).result()  # type: ignore[union-attr]
        assert guarded or module.cudart().ranges != before
    gc.collect()
    assert (module.cudart().ranges == before) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_streams_of_every_device_are_taken_over(module: Any, monkeypatch: pytest.MonkeyPatch, *, guarded: bool) -> None:
    """One state on two devices, each computing on a stream of its own."""
    if not guarded:
        monkeypatch.setattr(devices, "devices_in_use", lambda module: [module.current_device()])
    stager = DefaultStager()
    with module.stream(module.Stream(1)), module.stream(module.Stream(0)):
        state = {"first": filled(1), "second": filled(2, device=1)}
        found = stager.stage(state).result()  # type: ignore[union-attr]
        found = {name: tensor[0].item() for name, tensor in found.items()}
    stager.close()
    assert (found == {"first": 1, "second": 2}) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_freed_memory_is_noticed(monkeypatch: pytest.MonkeyPatch, *, guarded: bool) -> None:
    """What a saver knows of the last save is of no use for storages that were freed and allocated again."""
    state = {"weight": filled(1), "moment": filled(2)}

    def save_both() -> list[float]:
        with AsyncSaver("thread") as saver:
            saver.save(state, storage_writer=MemoryWriter(_FOLDER)).result()  # type: ignore[union-attr]
            state["weight"] = state["moment"]
            other, state["weight"] = filled(3), filled(4)  # the other one gets the freed memory
            if not guarded:
                monkeypatch.setattr(Sources, "same_as", lambda *_: True)
            saver.save({**state}, storage_writer=MemoryWriter(_FOLDER)).result()  # type: ignore[union-attr]
            del other
        template = {name: torch.zeros(_LARGE) for name in ("weight", "moment")}
        load(template, storage_reader=MemoryReader(_FOLDER))
        return [tensor[0].item() for tensor in template.values()]

    if guarded:
        assert save_both() == [4, 2]
    else:
        with pytest.raises(StagingMismatchError, match="'weight' is described as"):
            save_both()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_failed_copy_waits_for_the_others(monkeypatch: pytest.MonkeyPatch, *, guarded: bool) -> None:
    """The memory of the copy belongs to the next save, into which copies in flight would write."""
    calls: list[torch.Tensor] = []

    def fail_second(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise RuntimeError("the device reports an error")
        target.copy_(source, non_blocking=non_blocking)

    stager = DefaultStager()
    state = {"first": filled(1), "second": filled(2)}
    pretend.machine.finish()
    monkeypatch.setattr(copy_state, "copy_elements", fail_second)
    if not guarded:
        monkeypatch.setattr(CopyStream, "synchronize", nothing)
    with pytest.raises(RuntimeError, match="reports an error"):
        stager.stage(state).result()  # type: ignore[union-attr]
    assert (pretend.machine.pending() == 0) == guarded
    stager.close()


@pytest.mark.parametrize("guarded", [True, False])
def test_memory_under_a_copy_stays_pinned(module: Any, monkeypatch: pytest.MonkeyPatch, *, guarded: bool) -> None:
    """Pieces that a failed save does not take."""
    if not guarded:
        monkeypatch.setattr(module, "synchronize", nothing)
    pieces = TensorPieces(filled(1)).pieces(40_000)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    del pieces
    gc.collect()
    found, pretend.machine.violations[:] = [*pretend.machine.violations], []
    assert (found == []) == guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_a_failed_load_keeps_what_its_copies_write_to(
    module: Any, monkeypatch: pytest.MonkeyPatch, *, guarded: bool
) -> None:
    """The caller deletes the template, and the next tensor must not get memory that copies still write to."""
    size = 1 << 20
    save({"weight": torch.full((size,), 5.0)}, storage_writer=MemoryWriter(_FOLDER))
    (name,) = (name for name in OBJECTS if name.startswith(_FOLDER) and name.endswith(".distcp"))
    data = bytearray(OBJECTS[name])
    data[len(data) * 3 // 4] ^= 1
    monkeypatch.setitem(OBJECTS, name, bytes(data))
    buffers: list[torch.Tensor] = []  # kept, as CUDA's allocator keeps pinned memory

    def keep_buffer(nbytes: int) -> torch.Tensor:
        buffers.append(devices.pinned_buffer(nbytes))
        return buffers[-1]

    monkeypatch.setattr(read_plan, "STEP_BYTES", 1 << 20)  # copies of sound steps come before the damaged one
    monkeypatch.setattr(tensor_memory, "pinned_buffer", keep_buffer)
    if not guarded:
        monkeypatch.setattr(CopyStream, "keep", nothing)
    template = {"weight": filled(1, size=size)}
    address = template["weight"].data_ptr()
    with pytest.raises(CorruptCheckpointError, match="'weight'"):
        load(template, storage_reader=MemoryReader(_FOLDER))
    del template
    gc.collect()
    assert pretend.machine.pending()
    other = filled(7, size=size)
    assert (other.data_ptr() != address) == guarded
    module.default_stream().synchronize()
    pretend.machine.finish()
    assert bool((other == 7).all()) == guarded


def test_a_device_out_of_memory_in_a_load(module: Any) -> None:
    """Converting dtypes needs memory on the device; the same load works once there is some.

    There is no guard to take out. The error ends the load at the first piece, and an allocator that finds no memory
    first waits for all copies. So the test holds what follows: the error is the device's, and no memory stays in use.
    """
    names = [f"weight-{number}" for number in range(20)]  # more than there are buffers for copies
    save({name: torch.full((_LARGE,), 5.0) for name in names}, storage_writer=MemoryWriter(_FOLDER))
    template = {name: filled(1).double() for name in names}
    module.empty_cache()
    allocated = pretend.memory.limits[0] = module.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match="device 0"):
        load(template, storage_reader=MemoryReader(_FOLDER))
    gc.collect()
    assert module.memory_allocated() == allocated
    pretend.memory.limits.clear()
    load(template, storage_reader=MemoryReader(_FOLDER))
    assert all((value == 5).all() for value in template.values())


def training(*, fused: bool = False) -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """A small training on the device: its network, its optimizer, and a function that makes a step."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 8).to(pretend.NAME)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
    data = torch.linspace(-1, 1, 32).view(4, 8).to(pretend.NAME)

    def step() -> float:
        loss = net(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return net, optimizer, step


@pytest.mark.parametrize("kind", ["thread", "process"])
@pytest.mark.parametrize("guarded", [True, False])
def test_steps_of_optimizers_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, *, guarded: bool
) -> None:
    """Moments on the device, steps on the CPU, in one save while training goes on."""
    net, optimizer, step = training()
    step()
    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    if not guarded:  # what is in host memory is not copied in the call, as streams copy the rest
        monkeypatch.setattr(copy_state, "ctypes", SimpleNamespace(memmove=nothing))
        with AsyncSaver(kind) as saver, pytest.raises(StagingMismatchError, match="step"):
            saver.save({"app": app_state(net, optimizer)}, checkpoint_id=tmp_path)
        return
    with AsyncSaver(kind) as saver:
        future = saver.save({"app": app_state(net, optimizer)}, checkpoint_id=tmp_path)
        expected = [step() for _ in range(3)]
        future.result()  # type: ignore[union-attr]
    net, optimizer, step = training()
    load({"app": app_state(net, optimizer)}, checkpoint_id=tmp_path)
    assert [step() for _ in range(3)] == expected


@pytest.mark.parametrize("fused", [True, False])
def test_steps_of_fused_optimizers_are_on_the_device(tmp_path: Path, *, fused: bool) -> None:
    """A state is loaded by the other kind of optimizer. There is no guard to take out: PyTorch places the steps."""
    net, optimizer, step = training(fused=fused)
    step()
    assert {state["step"].device.type for state in optimizer.state.values()} == {pretend.NAME if fused else "cpu"}
    save({"app": app_state(net, optimizer)}, checkpoint_id=tmp_path)
    expected = [step() for _ in range(3)]
    net, optimizer, step = training(fused=not fused)
    load({"app": app_state(net, optimizer)}, checkpoint_id=tmp_path)
    assert [step() for _ in range(3)] == expected


_ENDING = """
import os, sys, threading
import torch
from dcp_async import AsyncSaver, DefaultStager
from integration_tests.devices import pretend
pretend.install()
weight = torch.full((40_000,), 3.0, device=pretend.NAME)
held = pretend.hold()
AsyncSaver("thread").save({"weight": weight}, checkpoint_id=sys.argv[1], async_stager=DefaultStager())
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_process_that_ends_during_a_copy(tmp_path: Path, *, guarded: bool) -> None:
    """The process waits for the copy and the save; if it were killed, there would be nothing of them."""
    folder, end = str(tmp_path / "saved"), "threading.Timer(0.2, held.release).start()" if guarded else "os._exit(0)"
    ended = subprocess.run([sys.executable, "-c", _ENDING + end, folder], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    template = {"weight": torch.zeros(_LARGE)}
    if guarded:
        load(template, checkpoint_id=folder)
        assert (template["weight"] == 3).all()
    else:
        with pytest.raises(CheckpointNotFoundError):
            load(template, checkpoint_id=folder)
