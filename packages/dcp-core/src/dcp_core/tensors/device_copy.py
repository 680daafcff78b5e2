"""Asynchronous copies of CPU buffers to tensors on any device, which wait only at the end for all copies."""

from __future__ import annotations

import queue
import threading

import torch

from dcp_core.tensors.element_copy import copy_elements

__all__ = ["DeviceCopies"]

# Enough that reading threads seldom wait for a transfer; at 2 MiB a step they hold 16 MiB of pinned memory.
_MAX_SLOTS = 8


class DeviceCopies:
    """Copier of CPU buffers to tensors on any device, asynchronously for CUDA. Thread-safe.

    Copies to a CUDA device use pinned memory and a separate stream. This stream waits for the work that was on the
    calling thread's current stream when `prepare` was called; so call `prepare` first, in the thread that uses the
    tensors. Copies to other devices, or without `prepare`, are complete when `copy` returns.
    """

    def __init__(self) -> None:
        self._lanes: dict[torch.device, _Lane] = {}
        self._lock = threading.Lock()

    def prepare(self, device: torch.device) -> None:
        """Prepare copies to a device: they will run after the work on the calling thread's current CUDA stream."""
        if device.type == "cuda":
            with self._lock:
                if device not in self._lanes:
                    self._lanes[device] = _Lane(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy the CPU tensor `source` into `target`; `source` may be changed when `copy` returns."""
        lane = self._lanes.get(target.device)
        with torch.inference_mode(target.is_inference()):  # a tensor made in that mode is changed in it alone
            if lane is None:
                copy_elements(target, source)
            else:
                lane.copy(target, source)

    def finish(self, device: torch.device) -> None:
        """Wait until all started copies to a device are complete."""
        lane = self._lanes.get(device)
        if lane is not None:
            lane.finish()


class _Slot:
    """A pinned buffer, and the event that marks the end of the last copy out of it."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fill(self, source: torch.Tensor) -> torch.Tensor:
        """Copy the source's elements contiguously into this buffer, and return them."""
        self.copied.synchronize()
        if self.memory.numel() < source.nbytes:
            self.memory = torch.empty(source.nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        staged = self.memory[: source.nbytes].view(source.dtype).view(source.shape)
        copy_elements(staged, source)
        return staged


class _Lane:
    """The stream and the pinned buffers for copies to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._free: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(_MAX_SLOTS):
            self._free.put(_Slot())

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # First in, first out: the slot whose copy has had the most time. Threads give slots back soon, so none starves.
        slot = self._free.get()
        try:
            staged = slot.fill(source)
            with torch.cuda.stream(self._stream):
                if target.dtype != staged.dtype or not target.is_contiguous():
                    # Converted and scattered on the device: on the host torch would do it in pageable memory.
                    staged = staged.to(self._device, non_blocking=True)
                copy_elements(target, staged, non_blocking=True)
                slot.copied.record(self._stream)
        finally:
            self._free.put(slot)

    def finish(self) -> None:
        self._stream.synchronize()
