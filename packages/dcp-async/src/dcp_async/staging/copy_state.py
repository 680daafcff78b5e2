"""`Stager`: splits a state dict into skeleton and tensors, and copies the tensors into an arena."""

from __future__ import annotations

import copy
import ctypes
import functools
import secrets
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

from dcp_async.staging.arenas import Arena, ArenaPool
from dcp_async.staging.checks import MutationGuard, check_described
from dcp_async.staging.placement import Budget, Placement, Sources, place, sources_of
from dcp_async.staging.skeleton import Contents, Skeleton, fill, leaves_of, look_through
from dcp_async.staging.waves import WaveSource
from dcp_core.errors import NotEnoughMemoryError
from dcp_core.tables.value_table import is_plain
from dcp_core.tensors.devices import CopyStream, device_module
from dcp_core.tensors.kinds import DESCRIBING, children_of, described_like, is_dtensor, with_local
from dcp_core.tensors.tensor_memory import check_memory, copy_elements
from dcp_io import MemoryLender

T = TypeVar("T")

_SLICE_BYTES = 16 << 20
_LARGE_BYTES = 1 << 20


def arena_view(
    memory: torch.Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a view at a byte offset of an arena; `stride` is in elements."""
    made = torch.empty(0, dtype=dtype, device="cpu")  # the caller may have another default device
    made.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)
    return made


def copied_strides(shape: Sequence[int], strides: tuple[int, ...], *, compact: bool) -> tuple[int, ...]:
    """Return the strides of a tensor's copy in elements; contiguous if `compact`."""
    return torch.empty(shape, device="meta").stride() if compact else strides


class Copier:
    """Copier into an arena, with `threads` threads including the caller's."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="dcp-copy") if threads > 1 else None
        self._streams: dict[torch.device, CopyStream] = {}

    def copy(self, placement: Placement, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Copy tensors as in `placement`; the copies are complete on return."""
        begin = memory.data_ptr()
        sources, offsets, lengths = (each.tolist() for each in placement.pieces)
        busy: dict[torch.device, CopyStream] = {}
        try:
            for row in placement.by_tensor.tolist():
                self._copy_one(tensors[row], placement, row, memory, busy)
            large = [
                cut
                for source, offset, length in zip(sources, offsets, lengths, strict=True)
                if length >= _LARGE_BYTES
                for cut in _slices(begin + offset, source, length)
            ]
            others = self._start_others(large)
            move = ctypes.memmove
            for source, offset, length in zip(sources, offsets, lengths, strict=True):
                if length < _LARGE_BYTES:
                    move(begin + offset, source, length)
            _drain(large)
            for each in others:
                each.result()
        finally:  # the memory of a copy that failed is used by the next one
            for stream in busy.values():
                stream.synchronize()

    def close(self) -> None:
        """End the copying threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _start_others(self, large: list[tuple[int, int, int]]) -> list[Future[None]]:
        if self._pool is None or len(large) < 2:
            return []
        return [self._pool.submit(_drain, large) for _ in range(min(self._threads - 1, len(large) - 1))]

    def _copy_one(
        self,
        source: torch.Tensor,
        placement: Placement,
        row: int,
        memory: torch.Tensor,
        busy: dict[torch.device, CopyStream],
    ) -> None:
        strides = copied_strides(source.shape, source.stride(), compact=bool(placement.compact[row]))
        source = source.detach()
        target = arena_view(memory, int(placement.offsets[row]), source.dtype, source.shape, strides)
        if not (
            placement.compact[row] or source.is_contiguous()
        ):  # elements may overlap, and torch refuses to write such
            count = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, strides, strict=True))
            source, target = source.as_strided((count,), (1,)), target.as_strided((count,), (1,))
        stream = None if source.is_cpu else busy.get(source.device) or self._stream(source.device)
        if stream is None:
            copy_elements(target, source)
            return
        busy[source.device] = stream
        with stream.entered():
            copy_elements(target, source, non_blocking=True)

    def _stream(self, device: torch.device) -> CopyStream | None:
        stream = self._streams.get(device)
        if stream is None:
            module = device_module(device)
            if module is None:
                return None
            stream = self._streams[device] = CopyStream(module, device)
        stream.follow()
        return stream


def _slices(target: int, source: int, length: int) -> Iterator[tuple[int, int, int]]:
    for at in range(0, length, _SLICE_BYTES):
        yield target + at, source + at, min(_SLICE_BYTES, length - at)


def _drain(work: list[tuple[int, int, int]]) -> None:
    move = ctypes.memmove
    while work:
        try:
            target, source, length = work.pop()
        except IndexError:
            return
        move(target, source, length)


_KEPT_STRUCTURES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Skeleton of a state dict, and layout of the tensors in the arena.

    From offset `resident_bytes` on, tensors are copied in waves. `compact` copies are contiguous.
    """

    identifier: str
    skeleton: Skeleton
    offsets: tuple[int, ...]
    """In bytes."""
    compact: tuple[bool, ...]
    nbytes: int
    resident_bytes: int

    @property
    def wave_bytes(self) -> int:
        """Bytes copied in waves."""
        return self.nbytes - self.resident_bytes


@dataclass(slots=True)
class Staged:
    """Copy of one state dict; `waves` has tensors outside of the arena."""

    structure: Structure
    arena: Arena
    objects: list[Any]
    waves: WaveSource | None = None

    def state_dict(self, addresses: torch.Tensor | None = None) -> dict[Any, Any]:
        """Return the copy as views of the arena, and of `addresses` for waves."""
        tensors = iter(staged_tensors(self.structure, self.arena.view(), addresses))
        return fill(self.structure.skeleton, tensors, iter(self.objects))


def staged_tensors(
    structure: Structure, memory: torch.Tensor, addresses: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the tensors as views of an arena, and of `addresses` for waves."""
    described = zip(leaves_of(structure.skeleton), structure.offsets, structure.compact, strict=True)
    found = []
    for (dtype, shape, strides), offset, compact in described:
        copied = copied_strides(shape, strides, compact=compact)
        if addresses is None or offset < structure.resident_bytes or 0 in shape:
            found.append(arena_view(memory, offset, dtype, shape, copied))
        else:
            found.append(arena_view(addresses, offset - structure.resident_bytes, dtype, shape, copied))
    return found


@dataclass(slots=True, eq=False)
class _Known:
    structure: Structure
    sources: Sources
    placement: Placement
    budget: Budget | None


@dataclass(slots=True)
class Stager:
    """Copier of state dicts into arenas, in waves only with a `budget`."""

    pool: ArenaPool
    copier: Copier
    guard: MutationGuard | None = None
    budget: Budget | None = None
    _known: list[_Known] = field(default_factory=list)
    _forms: dict[Hashable, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stage(
        self,
        state_dict: Mapping[Any, Any],
        *,
        nested: bool = True,
        in_waves: bool = False,
        free_memory: Callable[[], object] | None = None,
        lender: MemoryLender | None = None,
    ) -> Staged:
        """Copy a state dict into an arena; the copy is complete on return, except for waves.

        With `nested` False, each top-level container is one object. `free_memory` waits for earlier copies. A `lender`
        gives the memory for the whole copy.

        Raises:
            UnsupportedValueError: A tensor or object cannot be saved.
            NotEnoughMemoryError: The copy would exceed the memory limit.
            StagingMismatchError: A tensor changed, or its copy is wrong.
        """
        with self._lock:
            contents = look_through(state_dict, nested=nested, forms=self._forms)
            budget = self.budget if in_waves and lender is None else None
            return self._copy(contents, budget, free_memory, lender)

    def measure(self, state_dict: Mapping[Any, Any]) -> tuple[int, int]:
        """Return the size of a copy, and how many bytes do not fit."""
        placement = place(sources_of(look_through(state_dict, nested=True, forms={}).tensors), self.budget)
        if self.budget is None or not placement.wave_bytes:
            return placement.nbytes, 0
        return self.budget.nbytes, placement.nbytes - self.budget.nbytes

    def stage_as_it_is(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Arena]:
        """Copy for a custom planner, with container types, DTensors and objects."""
        arenas: list[Arena] = []

        def copy_tensors(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nodes = tuple([("t", each.dtype, each.shape, each.stride(), False) for each in tensors])
            staged = self._copy(Contents(("l", nodes), [*tensors], [*names]))
            arenas.append(staged.arena)
            return staged_tensors(staged.structure, staged.arena.view())

        with self._lock:
            try:
                return _copy_tree(state_dict, copy_tensors), arenas[0]
            except BaseException:
                for arena in arenas:
                    self.pool.give_back(arena)
                raise

    def _copy(
        self,
        contents: Contents,
        budget: Budget | None = None,
        free_memory: Callable[[], object] | None = None,
        lender: MemoryLender | None = None,
    ) -> Staged:
        known = self._find(contents, budget)
        placement = known.placement
        arena = self._take(_memory_for(placement, budget), free_memory, lender)
        try:
            memory = arena.view()
            samples = None if self.guard is None else self.guard.sample(contents, placement)

            def check(copied_bytes: int) -> None:
                check_described(contents, known.sources)
                if samples is not None:
                    samples.check(memory, copied_bytes)

            self.copier.copy(placement, contents.tensors, memory)
            check(placement.resident_bytes)
            staged = Staged(known.structure, arena, contents.objects)
            if budget is not None and placement.wave_bytes:
                # Resident copies are not checked again: a custom writer may have changed them.
                later = functools.partial(check, 0)
                staged.waves = WaveSource(contents.tensors, placement, memory, budget, later)
        except BaseException:
            self.pool.give_back(arena)
            raise
        return staged

    def _take(self, nbytes: int, free_memory: Callable[[], object] | None, lender: MemoryLender | None) -> Arena:
        try:
            return self.pool.take(nbytes, lender)
        except NotEnoughMemoryError:
            if free_memory is None or lender is not None:
                raise
        free_memory()
        return self.pool.take(nbytes)

    def _find(self, contents: Contents, budget: Budget | None) -> _Known:
        sources = sources_of(contents.tensors)
        alike = [each for each in self._known if each.structure.skeleton == contents.skeleton]
        known = next((each for each in alike if each.budget == budget), None)
        if known is not None and known.sources.same_as(sources):
            self._known.remove(known)
        else:
            for row in sources.without_memory():
                check_memory(contents.names[row], contents.tensors[row])
            known = self._adopt(alike, contents, sources, place(sources, budget), budget)
        self._known.append(known)
        del self._known[:-_KEPT_STRUCTURES]
        return known

    def _adopt(
        self,
        alike: Sequence[_Known],
        contents: Contents,
        sources: Sources,
        placement: Placement,
        budget: Budget | None,
    ) -> _Known:
        for each in alike:
            if each.placement.key() == placement.key():
                self._known.remove(each)
                return _Known(each.structure, sources, placement, budget)
        offsets, compact = placement.offsets.tolist(), np.asarray(placement.compact).tolist()
        sizes = placement.nbytes, placement.resident_bytes
        structure = Structure(secrets.token_hex(8), contents.skeleton, tuple(offsets), tuple(compact), *sizes)
        return _Known(structure, sources, placement, budget)


def _memory_for(placement: Placement, budget: Budget | None) -> int:
    if budget is None or not placement.wave_bytes:
        return placement.nbytes
    if placement.resident_bytes + 2 * budget.piece_bytes > budget.nbytes:
        raise NotEnoughMemoryError(
            f"{placement.nbytes:,} bytes are to be staged, {placement.resident_bytes:,} of them of tensors below 128 "
            f"KiB, which are not copied in waves; max_staging_bytes allows {budget.nbytes:,} and needs room for both. "
            "Raise it"
        )
    return budget.nbytes


def _copy_tree(
    state_dict: dict[str, Any], copy_tensors: Callable[[Sequence[str], Sequence[torch.Tensor]], list[torch.Tensor]]
) -> dict[str, Any]:
    """Return a deep copy with the same container types; `copy_tensors` copies named plain or local tensors."""
    found = {id(tensor): (name, tensor) for name, tensor in _tensors(state_dict, "")}
    names, sources = [name for name, _ in found.values()], [source for _, source in found.values()]
    copies = copy_tensors(names, list(map(_memory, names, sources)))
    # For `deepcopy`, these are done.
    memo: dict[int, Any] = {id(source): _like(source, copied) for source, copied in zip(sources, copies, strict=True)}
    copied: dict[str, Any] = copy.deepcopy(state_dict, memo)
    return copied


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        local = value._local_tensor if is_dtensor(value) else value  # noqa: SLF001
        # `deepcopy` cannot copy a DTensor, and takes the attributes of a tensor along.
        described = is_dtensor(value) and type(local) is torch.Tensor and not DESCRIBING.isdisjoint(vars(local))
        if (is_plain(local) or described) and not local.is_quantized:
            yield name, value
        return
    prefix = f"{name}." if name else ""
    for key, item in enumerate(value) if isinstance(value, set) else children_of(value) or ():
        yield from _tensors(item, f"{prefix}{key}")


def _memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
    local = tensor._local_tensor if is_dtensor(tensor) else tensor  # noqa: SLF001
    check_memory(name, local)
    return local.detach().resolve_conj().resolve_neg()


def _like(source: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    return with_local(source, described_like(source._local_tensor, copied)) if is_dtensor(source) else copied  # noqa: SLF001
