"""Accelerators of any kind: their streams, and host memory that they copy to and from asynchronously.

`torch.accelerator` has no streams that a thread can enter in every supported version of PyTorch, and neither memory
statistics nor random states. They come from the device's own module, such as `torch.cuda`, `torch.xpu` or `torch.npu`.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")

_NEEDED = ("Stream", "Event", "stream", "current_stream", "current_device", "set_device", "is_initialized")
_HOST_REGISTER_PORTABLE = 1


def device_module(device: torch.device) -> Any | None:
    """Return the module of a device with streams; None for the CPU, and for devices without streams such as MPS."""
    if device.type in {"cpu", "meta"}:
        return None
    module = getattr(torch, device.type, None)
    return module if all(hasattr(module, name) for name in _NEEDED) else None


def accelerator() -> Any | None:
    """Return the module of the accelerator that this process uses, or None."""
    # The device that the build is for: querying whether it exists could initialise the driver, which forbids forks.
    module: Any = torch.get_device_module()
    if module is torch.cpu or not all(hasattr(module, name) for name in _NEEDED):
        return None
    return module if module.is_initialized() else None


def devices_in_use(module: Any) -> list[int]:
    """Return the devices on which this process has allocated memory.

    A call on another device would create a context there, which takes hundreds of megabytes.
    """
    if not hasattr(module, "memory_reserved"):
        return [module.current_device()]
    return [number for number in range(module.device_count()) if module.memory_reserved(number) > 0]


def finish_computing(values: Iterable[Any] | None = None) -> None:
    """Wait until this thread's streams have computed `values`, or all values: other threads have streams of their own.

    Nothing is awaited if all values are in host memory.
    """
    module = accelerator()
    if module is None or (values is not None and not any(map(_may_be_on_device, values))):
        return
    for number in devices_in_use(module):
        module.current_stream(number).synchronize()


def _may_be_on_device(value: Any) -> bool:
    return not value.is_cpu if isinstance(value, torch.Tensor) else hasattr(value, "local_shards")


def on_this_stream(function: Callable[[], T]) -> Callable[[], T]:
    """Wrap a function for another thread, with this thread's current device, and its current streams on all devices."""
    module = accelerator() if torch.accelerator.is_available() else None
    if module is None:
        return function
    current = module.current_device()
    # The stream that is entered last chooses the device.
    numbers = sorted(devices_in_use(module), key=lambda number: number == current)
    streams = [module.current_stream(number) for number in numbers]

    def call() -> T:
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(module.stream(stream))
            module.set_device(current)
            return function()

    return call


class CopyStream:
    """A stream for copies from and to one device, beside the streams that compute."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream = module.Stream(device)

    def follow(self) -> None:
        """Let later copies wait for the work that the calling thread's current stream has now."""
        self._stream.wait_event(self._module.current_stream(self._device).record_event())

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the thread's current device and stream are these."""
        entered: contextlib.AbstractContextManager[object] = self._module.stream(self._stream)
        return entered

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep the allocator from reusing a tensor's memory before the copies of now have ended."""
        tensor.record_stream(self._stream)

    def event(self) -> Any:
        """Return an event that was not recorded."""
        return self._module.Event()

    def record(self, event: Any) -> None:
        """Record an event after the copies of now."""
        event.record(self._stream)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


def pinned_buffer(nbytes: int) -> torch.Tensor:
    """Return host memory as uint8, pinned if the accelerator has pinned memory."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
    except (RuntimeError, NotImplementedError):
        own = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)[:nbytes]  # pages of its own
        pin(own, own.ctypes.data, nbytes)
        return torch.from_numpy(own)


def pin(owner: object, address: int, nbytes: int) -> Callable[[], object] | None:
    """Pin host memory until its `owner` is deleted or the returned function is called; None if that is impossible.

    Source: CUDA `cudaHostRegister`; ROCm's build of PyTorch has it under the same name.
    """
    module = accelerator()
    if module is None or not hasattr(module, "cudart") or not nbytes:
        return None
    runtime = module.cudart()
    # The runtime creates a context on the thread's current device, which in a new thread is device 0.
    number = next(iter(devices_in_use(module)), module.current_device())
    with module.device(number):
        if runtime.cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE) != runtime.cudaError.success:
            return None

    def unpin() -> None:
        for each in devices_in_use(module):  # a load or save that failed may have left copies running
            module.synchronize(each)
        with module.device(number):
            runtime.cudaHostUnregister(address)

    return weakref.finalize(owner, unpin)


def group_device() -> torch.device:
    """Return the device of tensors in the default group's collectives: the CPU if the group can use it."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    types = {device.type for device in group._device_types} if group is not None else set()  # noqa: SLF001
    if not types or "cpu" in types:
        return torch.device("cpu")
    device_type = min(types)
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
