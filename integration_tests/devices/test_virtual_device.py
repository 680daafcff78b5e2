"""The pretend device: what it does late, what it refuses, and what PyTorch does not let Python do."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_core.tensors.devices import pin
from integration_tests.devices import pretend

pytestmark = pytest.mark.device


@pytest.fixture(autouse=True)
def module(device: str) -> Iterator[Any]:
    if device != pretend.NAME:
        pytest.skip("tests the pretend device itself")
    gc.collect()  # memory that earlier tests leave would be free in the middle of a test
    yield torch.get_device_module(device)
    pretend.machine.pageable_copies = 0


def test_the_host_cannot_read_its_memory() -> None:
    tensor = torch.ones(4, device=pretend.NAME)
    child = os.fork()
    if not child:
        faulthandler.disable()
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_work_runs_when_it_is_awaited(module: Any) -> None:
    tensor = torch.ones(4, device=pretend.NAME)
    host = torch.zeros(4)
    unpin = pin(host, host.data_ptr(), 16)
    assert unpin is not None
    host.copy_(tensor, non_blocking=True)
    assert host.tolist() == [0] * 4
    module.current_stream().synchronize()
    assert host.tolist() == [1] * 4
    unpin()
    assert pretend.machine.pageable_copies == 0


def test_a_copy_to_pageable_memory_is_not_asynchronous() -> None:
    host = torch.zeros(4)
    host.copy_(torch.ones(4, device=pretend.NAME), non_blocking=True)
    assert host.tolist() == [1] * 4
    assert pretend.machine.pageable_copies == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_streams_are_ordered_by_events_alone(module: Any, *, ordered: bool) -> None:
    tensor, stream = torch.full((4,), 7.0, device=pretend.NAME), module.Stream()
    if ordered:
        stream.wait_stream(module.current_stream())
    with module.stream(stream):
        found = (tensor + 1).cpu()
    assert (found == 8).all() == ordered


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_is_reused_as_soon_as_its_stream_allows(module: Any, *, recorded: bool) -> None:
    tensor, stream = torch.ones(4, device=pretend.NAME), module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        doubled = tensor * 2
    if recorded:
        tensor.record_stream(stream)
    address = tensor.data_ptr()
    del tensor
    other = torch.zeros(4, device=pretend.NAME)
    assert (other.data_ptr() == address) != recorded
    module.default_stream().synchronize()
    with module.stream(stream):
        assert doubled.tolist() == ([2] * 4 if recorded else [0] * 4)


def test_work_of_another_stream_runs_early_by_chance(module: Any) -> None:
    with pretend.machine.scheduled(pretend.Schedule(chance=0.9)):
        tensor = torch.ones(4, device=pretend.NAME)
        for _ in range(20):
            tensor += 1
    assert pretend.machine.pending() < 20
    assert tensor.tolist() == [21] * 4


def test_the_device_is_busy_until_it_is_released(module: Any) -> None:
    held = pretend.hold()
    event = module.Event()
    event.record()
    assert not event.query()
    held.release()
    event.synchronize()


def test_memory_can_run_out(module: Any) -> None:
    pretend.memory.limits[0] = module.memory_allocated() + 2048
    with pytest.raises(torch.OutOfMemoryError, match="device 0"):
        torch.empty(1 << 20, device=pretend.NAME)


def test_unpinning_memory_under_a_copy_is_noted(module: Any) -> None:
    host = torch.zeros(4)
    module.cudart().cudaHostRegister(host.data_ptr(), 16, 0)
    host.copy_(torch.ones(4, device=pretend.NAME), non_blocking=True)
    module.cudart().cudaHostUnregister(host.data_ptr())
    assert pretend.machine.violations == ["host memory was unpinned while a copy used it"]
    pretend.machine.violations.clear()


def test_a_network_trains_as_on_the_cpu() -> None:
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        data = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        found = []
        for _ in range(4):
            loss = net(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(pretend.NAME) == losses("cpu")


@pytest.mark.parametrize("kept", [2, 4])
def test_a_resized_storage_keeps_what_fits(kept: int) -> None:
    tensor = torch.arange(4, device=pretend.NAME, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    storage.resize_(kept)
    assert storage.nbytes() == kept
    storage.resize_(8)
    assert tensor.tolist()[:kept] == [*range(kept)]
    assert tensor.resize_(8).tolist()[:kept] == [*range(kept)]


def test_memory_of_a_storage_that_became_smaller_is_free(module: Any) -> None:
    tensor = torch.ones(1 << 20, device=pretend.NAME)
    before, address = module.memory_allocated(), tensor.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert module.memory_allocated() < before - (1 << 21)
    assert torch.ones(1 << 20, device=pretend.NAME).data_ptr() == address


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group(pretend.NAME, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_collective_writes_is_there_after_wait(group: None, *, waits: bool) -> None:
    tensor, found = torch.ones(4, device=pretend.NAME), torch.zeros(4, device=pretend.NAME)
    work = dist.all_gather([found], tensor, async_op=True)
    assert work is not None
    if waits:
        work.wait()
    assert found.tolist() == [float(waits)] * 4


def test_memory_of_a_collective_is_kept_until_wait(group: None, module: Any) -> None:
    found = torch.zeros(4, device=pretend.NAME)
    address = found.data_ptr()
    work = dist.all_gather([found], torch.ones(4, device=pretend.NAME), async_op=True)
    assert work is not None
    del found
    assert torch.zeros(4, device=pretend.NAME).data_ptr() != address
    work.wait()
    del work
    gc.collect()
    assert torch.zeros(4, device=pretend.NAME).data_ptr() == address


def on_device_1() -> None:
    (torch.ones(3, device=f"{pretend.NAME}:1", requires_grad=True) * 2).sum().backward()


# Hooks of PyTorch's C++ classes that its Python classes for devices do not have.
MISSING: dict[str, tuple[Callable[[], object], str]] = {
    "pinned memory": (lambda: torch.empty(3, pin_memory=True), "getPinnedMemoryAllocator"),
    "resizing a storage, other than by Python's method": (
        lambda: torch.ops.inductor.resize_storage_bytes_(torch.ones(3, device=pretend.NAME), 0),
        "resizePrivateUse1Bytes",
    ),
    "generators": (lambda: torch.Generator(device=pretend.NAME), "getNewGenerator"),
    "torch.accelerator.synchronize": (torch.accelerator.synchronize, "synchronizing all streams"),
    "memory statistics of torch.accelerator": (
        lambda: torch._C._accelerator_getDeviceStats(0),
        "not a DeviceAllocator",
    ),
    "backward on a second device": (on_device_1, "device_ready_queues_"),
}


@pytest.mark.parametrize("what", MISSING)
def test_what_python_cannot_give_to_pytorch(what: str) -> None:
    call, message = MISSING[what]
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        call()


def test_torch_accelerator_does_not_choose_streams_or_devices(module: Any) -> None:
    """The guard of Python devices has one device and one stream, so the module's functions are the only ones."""
    torch.accelerator.set_stream(module.Stream())
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_stream().stream_id == 0
    assert torch.accelerator.current_device_index() == 0


def test_a_storage_without_a_tensor_crashes() -> None:
    """There is no way to give PyTorch an allocator; `torch.load` to the device needs one."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        torch.UntypedStorage(8, device=pretend.NAME)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
