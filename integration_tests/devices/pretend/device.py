"""`torch.pretend`: the module of the pretend device, with the functions of the module for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from integration_tests.devices.pretend.machine import NAME, Event, Stream, machine
from integration_tests.devices.pretend.memory import HostRegistry, memory
from integration_tests.devices.pretend.operators import generators, registry

__all__ = [
    "Event",
    "Stream",
    "cudart",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_rng_state",
    "get_rng_state_all",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "memory_allocated",
    "memory_reserved",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]


def is_available() -> bool:
    """Return True."""
    return True


def is_initialized() -> bool:
    """Return whether this process has used a device."""
    return bool(machine.contexts)


def device_count() -> int:
    """Return the number of devices."""
    return machine.devices


def current_device() -> int:
    """Return this thread's device."""
    return machine.local.device


def set_device(device: Any) -> None:
    """Set this thread's device."""
    machine.local.device = machine.index(device)


@contextlib.contextmanager
def device(device: Any) -> Iterator[None]:
    """Set this thread's device for a while."""
    before, machine.local.device = machine.local.device, machine.index(device)
    try:
        yield
    finally:
        machine.local.device = before


def current_stream(device: Any = None) -> Stream:
    """Return this thread's stream on a device."""
    return machine.current_stream(machine.index(device))


def default_stream(device: Any = None) -> Stream:
    """Return the default stream of a device."""
    return machine.stream(machine.index(device), 0)


def set_stream(stream: Stream) -> None:
    """Set this thread's stream, and its device."""
    machine.local.device = stream.device_index
    machine.local.streams[stream.device_index] = stream


@contextlib.contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """Set this thread's stream and device for a while."""
    if stream is None:
        yield
        return
    before, device = current_stream(stream.device_index), machine.local.device
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        machine.local.device = device


def synchronize(device: Any = None) -> None:
    """Wait for all work of a device."""
    machine.finish(machine.index(device))


def memory_allocated(device: Any = None) -> int:
    """Return the bytes of all storages."""
    return memory.allocated(machine.index(device))


def max_memory_allocated(device: Any = None) -> int:
    """Return the highest `memory_allocated` so far."""
    return memory.peak[machine.index(device)]


def memory_reserved(device: Any = None) -> int:
    """Return the bytes of storages and of the cache."""
    return memory.reserved(machine.index(device))


def empty_cache() -> None:
    """Free what no storage uses."""
    memory.empty_cache()


def cudart() -> HostRegistry:
    """Return what registers host memory."""
    return registry


def _generator(device: Any) -> torch.Generator:
    return generators.setdefault(machine.index(device), torch.Generator().manual_seed(0))


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of a device's random numbers."""
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the state of a device's random numbers."""
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state(number) for number in range(machine.devices)]


def manual_seed(seed: int) -> None:
    """Seed the random numbers of this thread's device."""
    _generator(None).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random numbers of all devices."""
    for number in range(machine.devices):
        _generator(number).manual_seed(seed)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes of `torch.autocast`."""
    return [torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def _sleep(cycles: int) -> None:
    del cycles
    machine.launch(current_stream(), None)


__name__ = f"torch.{NAME}"
