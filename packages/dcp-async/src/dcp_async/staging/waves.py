"""Waves: copying of tensors that do not fit into the memory for copies, while the save writes them.

For `WaveSource` in the trainer, the thread that called `save` copies on request, so that nothing changes before the
last byte is copied. `WaveFeed` is the save's part. Each message is one packet:

    ("begin", item, offset, dtype, shape, strides)   an item in the layout of the copies
    ("fill", item, slot) → ("filled", item, slot)    the next bytes of the item, up to the size of a slot
    ("done",) → ("ok",)                              no further requests; the values may change after the answer
    → ("failed", pickled error)                      instead of any answer
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import pickle
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dcp_async.errors import SaverDeadlineError, StagingMismatchError, WorkerError
from dcp_async.staging.placement import Budget, Placement
from dcp_core import DefaultSavePlanner, SavePlan, SavePlanner, StorageMeta, WriteItem
from dcp_core.errors import UnsupportedValueError
from dcp_core.planning.replicas import replica_digests
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.storage.storage_writer import tensor_payload
from dcp_core.tables.plan_columns import columns_of
from dcp_core.tensors.kinds import ArchivedTensor, is_wrapper
from dcp_io import PiecewiseData
from dcp_io.workers import check_stop

PACKET_BYTES = 1 << 16
_SLICE_SECONDS = 0.1


class WaveSource:
    """The tensors that do not fit. The window is the end of `memory`; `check` raises if a tensor has changed."""

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
        """In the end less than `wave_bytes` if other ranks write some."""
        self._placement, self._check = placement, check
        rows = np.flatnonzero(placement.offsets >= placement.resident_bytes).tolist()
        self._rows = [(int(placement.offsets[row]), tensors[row], bool(placement.compact[row])) for row in rows]
        found = replica_digests([tensor.detach() for _, tensor, _ in self._rows], everything=False)
        self.digests = {offset: digest for (offset, _, _), digest in zip(self._rows, found, strict=True)}
        """Offset → checksum of a replica."""
        self._memory = memory
        self.piece_bytes = budget.piece_bytes
        self._items: dict[int, _Reader] = {}
        self._ours, self.saver_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def serve(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Serve requests until everything is copied or the save has ended; the save fails with a raised error.

        Raises SaverDeadlineError after `seconds`, StagingMismatchError for a changed tensor, or a copy's error.
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
        """Release sockets and tensors; a waiting save fails."""
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
                        f"training waited {seconds:g} s (save_timeout_seconds) for the storage to take what does "
                        "not fit into max_staging_bytes; the save was given up. Allow more time or more memory, or "
                        "look for what holds the storage up"
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
    def __init__(self, tensor: torch.Tensor, piece_bytes: int) -> None:
        data = tensor_payload("", tensor).data
        self.left = tensor.nbytes
        self._piece_bytes = piece_bytes
        self._pieces: Iterator[Any] = (
            iter((data,)) if isinstance(data, bytes | memoryview) else data.pieces(piece_bytes)
        )
        self._piece = np.zeros(0, np.uint8)

    def copy_to(self, address: int) -> int:
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
    """Return the part `start` elements into a tensor's copy; None if the copy does not hold it."""
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


# More requests would not fill the window faster, and could fill the socket in both directions.
_UNANSWERED = 32
# Interval at which a thread that waits for bytes checks whether another one has failed.
_CHECK_SECONDS = 0.1


def reserve_addresses(nbytes: int) -> torch.Tensor:
    """Return `nbytes` addresses without memory. Reading one ends the process, so no defect saves arbitrary bytes."""
    mapped = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
    kind: Any = type("Addresses", (ctypes.c_uint8 * nbytes,), {})
    held = kind.from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    held.mapped = mapped  # kept while a tensor has its addresses
    return torch.from_numpy(np.frombuffer(held, np.uint8))


class WaveFeed:
    """Source of the bytes of tensors that are copied in waves.

    `connection`, to the `WaveSource`, is closed by `close`. `piece_bytes` is the size of a slot.
    """

    def __init__(
        self,
        connection: socket.socket,
        memory: torch.Tensor,
        resident_bytes: int,
        piece_bytes: int,
        addresses: torch.Tensor,
        digests: Mapping[int, int | None],
    ) -> None:
        self._connection = connection
        self._resident_bytes = resident_bytes
        self._window = memoryview(memory.numpy()[resident_bytes:])  # type: ignore[arg-type]
        self.piece_bytes = piece_bytes
        self._addresses = addresses
        self._digests = digests
        self._changed = threading.Condition()
        self._free = list(range(len(self._window) // piece_bytes))
        self._items: dict[int, _WavePieces] = {}
        self._unanswered = 0
        self._missing: int | None = None
        self._released = False
        self._error: BaseException | None = None

    def holds(self, value: object) -> bool:
        """Return whether a tensor, or a shard of a local tensor, has no memory."""
        if isinstance(value, LocalTensor):
            return any(self.holds(shard.get()) for shard in value.shards)
        if not isinstance(value, torch.Tensor) or is_wrapper(value):
            return False
        return value.untyped_storage().data_ptr() == self._addresses.data_ptr()

    def digest(self, tensor: torch.Tensor) -> int | None:
        """Return the checksum of a tensor without memory."""
        return self._digests.get(self._offset(tensor))

    def _offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self._addresses.data_ptr() + self._resident_bytes

    def expect(self, items: int) -> None:
        """Set the number of items; with none, the trainer continues immediately."""
        with self._changed:
            self._missing = items
            if not items:
                self._send("done")
        threading.Thread(target=self._listen, name="dcp-waves", daemon=True).start()

    def take(self, tensor: torch.Tensor) -> _WavePieces:
        """Return the bytes of a tensor or box, for one pass."""
        with self._changed:
            made = _WavePieces(self, len(self._items), tensor.nbytes, tensor.dtype.itemsize)
            self._items[made.number] = made
            if tensor.nbytes:
                shape, strides = tuple(tensor.shape), tuple(tensor.stride())
                self._send("begin", made.number, self._offset(tensor), tensor.dtype, shape, strides)
            else:
                self._arrived()
            return made

    def close(self) -> None:
        """End the waits of both sides; the trainer continues."""
        self._fail(WorkerError("the save has ended"))
        with contextlib.suppress(OSError):  # the other side closed first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def begin(self, item: _WavePieces) -> None:
        """Request the first bytes of an item."""
        with self._changed:
            item.wants = item.nbytes
            self._ask()

    def wait_for_piece(self, item: _WavePieces) -> memoryview:
        """Return the next bytes, valid until `free_piece`."""
        with self._changed:
            self._wait_for(lambda: bool(item.ready))
            at = item.ready[0] * self.piece_bytes
            return self._window[at : at + min(self.piece_bytes, item.nbytes - item.written)]

    def free_piece(self, item: _WavePieces, size: int) -> None:
        """Free these bytes."""
        with self._changed:
            item.written += size
            item.held -= 1
            self._free.append(item.ready.popleft())
            self._ask()
            if item.written == item.nbytes:
                # The save must not succeed before the trainer has checked that nothing has changed.
                self._wait_for(lambda: bool(self._missing) or self._released)

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        while not self._changed.wait_for(lambda: happened() or self._error is not None, _CHECK_SECONDS):
            check_stop()
        if self._error is not None:
            raise self._error

    def _ask(self) -> None:
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
    """The bytes of one item, a `dcp_io.PiecewiseData`. The attributes belong to the feed."""

    def __init__(self, feed: WaveFeed, number: int, nbytes: int, item_bytes: int) -> None:
        self._feed = feed
        self._item_bytes = item_bytes
        self._begun = False
        self.number = number
        self.nbytes = nbytes
        self.wants = 0
        """Bytes to request, rounded up to whole slots."""
        self.held = 0
        self.ready: deque[int] = deque()
        self.arrived = 0
        self.written = 0

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes in order; a second pass is possible within the first slot (for a sample)."""
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


class WavePlanner(DefaultSavePlanner):
    """Default planner that never reads described tensors."""

    feed: WaveFeed
    _described: frozenset[str] = frozenset()

    @classmethod
    def of(cls, planner: SavePlanner | None, feed: WaveFeed) -> WavePlanner:
        """Return a planner with the options of `planner`, if given."""
        made = cls()
        vars(made).update({} if planner is None else vars(planner), feed=feed)
        return made

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """See the base class; also notes the described tensors."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._described = frozenset(name for name, value in self.state_dict.items() if self.feed.holds(value))

    def replica_digests(self, held: Mapping[str, torch.Tensor | LocalTensor]) -> dict[Any, int]:
        """Return checksums, of described tensors the trainer's."""
        return super().replica_digests({name: self._digested(value) for name, value in held.items()})

    def _digested(self, value: Any) -> Any:
        """Replace tensors without memory by archives that are never read."""
        if isinstance(value, LocalTensor):
            return replace(value, shards=tuple([replace(each, get=self._getter(each)) for each in value.shards]))
        if not self.feed.holds(value):
            return value
        return ArchivedTensor(b"", value.size(), value.dtype, self.feed.digest(value))

    def _getter(self, shard: LocalShard) -> Callable[[], torch.Tensor]:
        return lambda: self._digested(shard.get())

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Tell the feed its number of items."""
        plan, columns = super().finish_plan(new_plan), columns_of(new_plan.items)
        rows = [row for row, name in enumerate(columns.table.tensor_names) if name in self._described]
        items = (item for row in rows for item in columns.tensor_items(row))
        self.feed.expect(sum(self.feed.holds(super(WavePlanner, self).resolve_data(item)) for item in items))
        return plan

    def resolve_pieces(self, write_item: WriteItem) -> PiecewiseData | None:
        """Return the bytes of a described tensor."""
        if write_item.index.fqn not in self._described:
            return None
        tensor = super().resolve_data(write_item)
        return self.feed.take(tensor) if isinstance(tensor, torch.Tensor) and self.feed.holds(tensor) else None

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Raise UnsupportedValueError for a described tensor."""
        found = super().resolve_data(write_item)
        if self.feed.holds(found):
            raise UnsupportedValueError(
                f"{write_item.index.fqn!r} is larger than the memory for copies, and this storage writer takes tensors "
                "as a whole: use a writer derived from ByteStorageWriter that does not replace write_data, or raise "
                "max_staging_bytes"
            )
        return found

    def plain_values(self) -> Mapping[str, Any]:
        """Return the values that are in memory."""
        return {name: value for name, value in self.state_dict.items() if name not in self._described}

    def writes_what_it_holds(self) -> bool:
        """Return True: pieces have the values that are described."""
        return True
