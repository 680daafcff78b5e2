"""`WaveFeed`: the saver's part of waves, which asks for the bytes of what does not fit while it writes them.

It is the `TensorFeed` of the save, in the thread or process that writes. The protocol is described in `wave_source`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import pickle
import socket
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from dcp_async.errors import StagingMismatchError, WorkerError
from dcp_async.staging.copy_state import Structure
from dcp_async.staging.wave_source import PACKET_BYTES

__all__ = ["WaveFeed", "reserve_addresses"]

# More would not fill the window faster, and could fill the socket in both directions.
_UNANSWERED = 32


def reserve_addresses(nbytes: int) -> torch.Tensor:
    """Return a tensor of `nbytes` addresses without memory, for tensors that are only described.

    Views of it have dtypes, sizes, strides and ties. Reading one ends the process by SIGSEGV: a defect must not save
    arbitrary bytes.
    """
    mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    kind: Any = type("Addresses", (ctypes.c_uint8 * nbytes,), {})
    held = kind.from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    held.mapped = mapped  # for as long as a tensor has its addresses
    return torch.from_numpy(np.frombuffer(held, np.uint8))


class WaveFeed:
    """Feed of the tensors that are copied in waves; satisfies `dcp_core.toolkit.TensorFeed`.

    Args:
        connection: Socket to the `WaveSource`; `close` closes it.
        memory: Memory of the arena.
        structure: Structure of the state dict.
        piece_bytes: Size of a slot of the window.
        addresses: Addresses of the described tensors, from `reserve_addresses`.
    """

    def __init__(
        self,
        connection: socket.socket,
        memory: torch.Tensor,
        structure: Structure,
        piece_bytes: int,
        addresses: torch.Tensor,
    ) -> None:
        self._connection = connection
        self._resident_bytes = structure.resident_bytes
        self._window = memoryview(memory.numpy()[structure.resident_bytes :])  # type: ignore[arg-type]
        self.piece_bytes = piece_bytes
        self._addresses = addresses
        self._changed = threading.Condition()
        self._free = list(range(len(self._window) // piece_bytes))
        self._items: dict[int, _WavePieces] = {}
        self._unanswered = 0
        self._missing: int | None = None
        self._released = False
        self._error: BaseException | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is only described, because it is copied in waves."""
        return tensor.untyped_storage().data_ptr() == self._addresses.data_ptr()

    def expect(self, items: int) -> None:
        """Set the number of items that are copied in waves; with none, the trainer goes on at once."""
        with self._changed:
            self._missing = items
            if not items:
                self._send("done")
        threading.Thread(target=self._listen, name="dcp-waves", daemon=True).start()

    def take(self, tensor: torch.Tensor) -> _WavePieces:
        """Return the bytes of a tensor, or of a box of one, for one pass."""
        with self._changed:
            made = _WavePieces(self, len(self._items), tensor.nbytes, tensor.dtype.itemsize)
            self._items[made.number] = made
            if tensor.nbytes:
                offset = tensor.data_ptr() - self._addresses.data_ptr() + self._resident_bytes
                self._send("begin", made.number, offset, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
            else:
                self._arrived()
            return made

    def abandon(self) -> None:
        """Make all waits for bytes raise."""
        self._fail(WorkerError("another item of this save could not be written"))

    def close(self) -> None:
        """End the waits of both sides; the trainer goes on."""
        self.abandon()
        with contextlib.suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def begin(self, item: _WavePieces) -> None:
        """Ask for the first bytes of an item."""
        with self._changed:
            item.wants = item.nbytes
            self._ask()

    def wait_for_piece(self, item: _WavePieces) -> memoryview:
        """Wait for the next bytes of an item, and return them; they stay until `free_piece`."""
        with self._changed:
            self._changed.wait_for(lambda: item.ready or self._error is not None)
            if self._error is not None:
                raise self._error
            at = item.ready[0] * self.piece_bytes
            return self._window[at : at + min(self.piece_bytes, item.nbytes - item.written)]

    def free_piece(self, item: _WavePieces, size: int) -> None:
        """Give the bytes of `wait_for_piece` back: they are written."""
        with self._changed:
            item.written += size
            item.held -= 1
            self._free.append(item.ready.popleft())
            self._ask()
            if item.written == item.nbytes:
                # The save must not succeed before the trainer has checked that nothing has changed.
                self._changed.wait_for(lambda: self._missing or self._released or self._error is not None)
                if self._error is not None:
                    raise self._error

    def _ask(self) -> None:
        """Ask for as many bytes as the window has room for; first for the item with the fewest in it."""
        while self._free and self._unanswered < _UNANSWERED:
            item = min(
                (each for each in self._items.values() if each.wants > 0), key=lambda one: one.held, default=None
            )
            if item is None:
                return
            item.wants -= self.piece_bytes
            item.held += 1
            self._unanswered += 1
            self._send("fill", item.number, self._free.pop())

    def _listen(self) -> None:
        try:
            while True:
                packet = self._connection.recv(PACKET_BYTES)
                if not packet:
                    raise EOFError  # noqa: TRY301 - handled like an error of the socket
                with self._changed:
                    if self._hear(*pickle.loads(packet)):
                        return
        except (OSError, EOFError):
            self._fail(StagingMismatchError("the trainer stopped copying in the middle of a save"))

    def _hear(self, kind: str, *rest: Any) -> bool:
        """Handle an answer; returns whether it is the last one."""
        if kind == "failed":
            self._fail(pickle.loads(rest[0]))
            return True
        if kind == "ok":
            self._released = True
            self._changed.notify_all()
            return True
        number, slot = rest
        item = self._items[number]
        item.ready.append(slot)
        item.arrived += min(self.piece_bytes, item.nbytes - item.arrived)
        self._unanswered -= 1
        self._ask()
        if item.arrived == item.nbytes:
            self._arrived()
        self._changed.notify_all()
        return False

    def _arrived(self) -> None:
        """Count an item whose bytes are all in the window; after the last one, the trainer may go on."""
        if self._missing is not None:
            self._missing -= 1
            if not self._missing:
                self._send("done")

    def _send(self, *message: Any) -> None:
        try:
            self._connection.send(pickle.dumps(message))
        except OSError:
            self._fail(StagingMismatchError("the trainer stopped copying in the middle of a save"))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class _WavePieces:
    """The bytes of one item; satisfies `dcp_io.PiecewiseData`. The attributes belong to the feed."""

    def __init__(self, feed: WaveFeed, number: int, nbytes: int, item_bytes: int) -> None:
        self._feed = feed
        self._item_bytes = item_bytes
        self._begun = False
        self.number = number
        self.nbytes = nbytes
        self.wants = 0
        """Number of bytes to ask for, rounded up to whole slots."""
        self.held = 0
        """Number of slots that are filled, or will be, with bytes of this item."""
        self.ready: deque[int] = deque()
        self.arrived = 0
        self.written = 0

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in order. A second pass is possible until the end of the first slot (for a sample)."""
        if not self._begun:
            self._begun = True
            self._feed.begin(self)
        elif self.written:
            raise StagingMismatchError("a tensor that is copied in waves was read twice; nothing was saved")
        step = max(1, max_bytes // self._item_bytes) * self._item_bytes  # transforms expect whole elements
        while self.written < self.nbytes:
            piece = self._feed.wait_for_piece(self)
            for start in range(0, len(piece), step):
                yield piece[start : start + step]
            self._feed.free_piece(self, len(piece))
