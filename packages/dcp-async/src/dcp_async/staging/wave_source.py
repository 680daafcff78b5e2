"""`WaveSource`: the trainer's part of waves, which copies what does not fit into the window when the save asks for it.

The thread that called `save` serves the requests, so that nothing can change before the last byte is copied. The
requests come from `wave_feed`, in the thread or process that writes; each message is one packet:

    ("begin", item, offset, dtype, shape, strides)   an item in the layout of the copies
    ("fill", item, slot) → ("filled", item, slot)    the next bytes of the item, up to the size of a slot
    ("done",) → ("ok",)                              no further requests; the values may change after the answer
    → ("failed", pickled error)                      instead of any answer
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dcp_async.errors import SaverDeadlineError, StagingMismatchError
from dcp_async.staging.placement import Budget, Placement
from dcp_core.toolkit import tensor_payload

__all__ = ["PACKET_BYTES", "WaveSource"]

PACKET_BYTES = 1 << 16
_SLICE_SECONDS = 0.1


class WaveSource:
    """Source of the tensors of one save that do not fit into the memory for copies.

    Args:
        tensors: All tensors of the state dict; only those behind `placement.resident_bytes` are used.
        placement: Layout of the copies.
        memory: Memory of the arena, whose end is the window.
        budget: Size of the memory and of the slots in the window.
        check: Function that raises an error if a tensor has changed since the copy began.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        placement: Placement,
        memory: torch.Tensor,
        budget: Budget,
        check: Callable[[], None],
    ) -> None:
        self.wave_bytes = placement.wave_bytes
        self.copied_bytes = 0
        """Number of bytes that were copied in waves so far; less than `wave_bytes` if other ranks write some."""
        self._placement, self._check = placement, check
        rows = np.flatnonzero(placement.offsets >= placement.resident_bytes).tolist()
        self._rows = [(int(placement.offsets[row]), tensors[row], bool(placement.compact[row])) for row in rows]
        self._memory = memory
        self.piece_bytes = budget.piece_bytes
        """Size of a slot of the window, in bytes."""
        self._items: dict[int, _Reader] = {}
        self._ours, self.saver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Copy what the save asks for, until everything is copied or the save has ended.

        Args:
            is_over: Function that returns whether the save has ended, with an error or without one.
            seconds: Longest time in seconds.

        Raises:
            SaverDeadlineError: The storage did not take the bytes in time.
            MutatedWhileStagedError: A tensor was changed meanwhile.
            Exception: A tensor cannot be copied. The save fails with the same error.
        """
        try:
            self._serve(is_over, time.monotonic() + seconds, seconds)
        except BaseException as error:
            self.abort(error)
            raise
        finally:
            self._items.clear()

    def abort(self, error: BaseException) -> None:
        """Make the save fail with `error`."""
        self._answer("failed", _pickled(error))

    def close(self) -> None:
        """Release sockets and tensors; a save that still waits for bytes fails."""
        self._rows, self._memory = [], torch.empty(0, dtype=torch.uint8, device="cpu")
        self._ours.close()
        self.saver_end.close()

    def _serve(self, is_over: Callable[[], bool], deadline: float, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._ours, select.POLLIN)
        while True:
            if not poller.poll(_SLICE_SECONDS * 1000):
                if is_over():
                    return
                if time.monotonic() > deadline:
                    raise SaverDeadlineError(
                        f"training waited {seconds:g} s (save_seconds) for the storage to take what does not fit into "
                        "max_staging_bytes; the save was given up. Allow more time or more memory, or look for what "
                        "holds the storage up"
                    )
                continue
            packet = b""
            with contextlib.suppress(ConnectionError):  # of a process that was killed
                packet = self._ours.recv(PACKET_BYTES)
            if not packet:  # the save has ended, and its future has the reason
                return
            kind, *rest = pickle.loads(packet)
            if kind == "done":
                self._check()
                self._answer("ok")
                return
            if kind == "begin":
                self._begin(*rest)
            else:
                self._fill(*rest)

    def _begin(
        self, item: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        self._items[item] = _Reader(self._find(offset, dtype, shape, strides), self.piece_bytes)

    def _fill(self, item: int, slot: int) -> None:
        reader = self._items[item]
        at = self._placement.resident_bytes + slot * self.piece_bytes
        self.copied_bytes += reader.copy_to(self._memory.data_ptr() + at)
        if not reader.left:
            del self._items[item]
        self._answer("filled", item, slot)

    def _find(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor, or the box of one, whose copy has this place in the layout."""
        for begin, tensor, compact in self._rows:
            delta = offset - begin
            if tensor.dtype is not dtype or delta < 0 or delta % dtype.itemsize or not tensor.numel():
                continue
            found = _box(tensor, delta // dtype.itemsize, shape, strides, compact=compact)
            if found is not None:
                return found
        raise StagingMismatchError(f"no tensor of this save has a copy at {offset:,}; nothing was saved")

    def _answer(self, *message: Any) -> None:
        try:
            self._ours.send(pickle.dumps(message))
        except OSError:  # the save has ended, and its future has the reason
            return


class _Reader:
    """The row-major bytes of a tensor, in pieces of one size."""

    def __init__(self, tensor: torch.Tensor, piece_bytes: int) -> None:
        data = tensor_payload("", tensor).data
        self.left = tensor.nbytes
        self._piece_bytes = piece_bytes
        self._pieces: Iterator[Any] = (
            iter((data,)) if isinstance(data, bytes | memoryview) else data.pieces(piece_bytes)
        )
        self._piece = np.zeros(0, np.uint8)

    def copy_to(self, address: int) -> int:
        """Copy the next piece to an address in memory, and return its size in bytes."""
        wanted = size = min(self._piece_bytes, self.left)
        while wanted:
            if not len(self._piece):
                self._piece = np.frombuffer(next(self._pieces), np.uint8)
            part = min(wanted, len(self._piece))
            ctypes.memmove(address, self._piece.ctypes.data, part)
            self._piece = self._piece[part:]
            address, wanted = address + part, wanted - part
        self.left -= size
        return size


def _box(
    tensor: torch.Tensor, start: int, shape: tuple[int, ...], strides: tuple[int, ...], *, compact: bool
) -> torch.Tensor | None:
    """Return the part of a tensor that begins `start` elements into its copy; None if the copy does not hold it."""
    tensor = tensor.detach()
    if not compact:
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        end = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.as_strided(shape, strides, tensor.storage_offset() + start) if last <= end else None
    if start >= tensor.numel() or len(shape) != tensor.dim():
        return None
    at = np.unravel_index(start, tuple(tensor.shape)) if tensor.dim() else ()
    for dim, (first, size) in enumerate(zip(at, shape, strict=True)):
        if int(first) + size > tensor.size(dim):
            return None
        tensor = tensor.narrow(dim, int(first), size)
    return tensor


def _pickled(error: BaseException) -> bytes:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - its class cannot be pickled
        data = b""
    if not data or len(data) > PACKET_BYTES // 2:
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"[:1000]))
    return data
