"""`Stager`: splits a state dict into skeleton (structure) and tensors, and copies the tensors into an arena.

The structure is cached: the next save of a state dict with the same structure takes little longer than the copy.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_async.errors import StagingLimitError
from dcp_async.staging.arena import Arena
from dcp_async.staging.arena_pool import ArenaPool
from dcp_async.staging.copying import Copier, arena_view, copied_strides
from dcp_async.staging.mutation_guard import MutationGuard
from dcp_async.staging.placement import Budget, Placement, Sources, place, sources_of
from dcp_async.staging.self_check import check_described, check_placed
from dcp_async.staging.skeleton import Contents, Skeleton, fill, leaves_of, look_through
from dcp_async.staging.tree_copy import copy_tree
from dcp_async.staging.wave_source import WaveSource
from dcp_io import MemoryLender

__all__ = ["Staged", "Stager", "Structure", "staged_tensors"]

_KEPT_STRUCTURES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Structure of a staged state dict: skeleton, and the layout of the tensors in the arena, but no tensors.

    Attributes:
        identifier: Text that identifies the structure in messages to a worker process.
        skeleton: Nesting, keys, dtypes and shapes of the state dict.
        compact: For each tensor, whether its copy is contiguous instead of having the tensor's strides.
        nbytes: Number of bytes of the layout.
        resident_bytes: Offset behind which tensors have no copy in the arena, but are copied in waves.
    """

    identifier: str
    skeleton: Skeleton
    offsets: tuple[int, ...]
    """Offset of each tensor in the arena, in bytes."""
    compact: tuple[bool, ...]
    nbytes: int
    resident_bytes: int

    @property
    def wave_bytes(self) -> int:
        """Number of bytes that are copied in waves."""
        return self.nbytes - self.resident_bytes


@dataclass(slots=True)
class Staged:
    """Staged copy of one state dict: structure, arena with the tensors, objects, and the source of what does not fit.

    Attributes:
        waves: Source of the tensors that are copied in waves; None if everything is in the arena.
    """

    structure: Structure
    arena: Arena
    objects: list[Any]
    waves: WaveSource | None = None

    def state_dict(self, addresses: torch.Tensor | None = None) -> dict[Any, Any]:
        """Return the copy as a state dict whose tensors are views of the arena.

        Args:
            addresses: Addresses for the tensors that are copied in waves.
        """
        tensors = iter(staged_tensors(self.structure, self.arena.view(), addresses))
        return fill(self.structure.skeleton, tensors, iter(self.objects))


def staged_tensors(
    structure: Structure, memory: torch.Tensor, addresses: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the tensors that a structure describes, as views of an arena's memory.

    Args:
        structure: Structure of the state dict.
        memory: Memory of the arena.
        addresses: Addresses of the tensors that are copied in waves, from `reserve_addresses`; needed if there are any.
    """
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
    """Cache entry: a structure, and where its tensors were when it was last staged."""

    structure: Structure
    sources: Sources
    placement: Placement
    budget: Budget | None


@dataclass(slots=True)
class Stager:
    """Stager that copies state dicts into arenas (reusable memory buffers).

    Args:
        pool: Pool of the arenas.
        copier: Copier of the tensors.
        guard: Guard that detects tensors that change during the copy; None for no guard.
        budget: Memory for the copies of a state dict that may be copied in waves; None if none may.
    """

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
        """Copy a state dict into an arena; the copy is complete on return, except of tensors that are copied in waves.

        Args:
            state_dict: State dict to copy.
            nested: Whether nested containers are split; with False, each top-level container is copied as one object.
            in_waves: Whether a state dict that is larger than the stager's `budget` may be copied in waves.
            free_memory: Function that waits until earlier copies are not used any more, if there is no memory left.
            lender: Lender of the memory of the storage that is saved to, where everything is staged at once; None for
                memory of the pool's own.

        Raises:
            UnsupportedValueError: A tensor or object cannot be saved.
            StagingLimitError: The copy would exceed the memory limit of staging.
            MutatedWhileStagedError: A tensor changed while it was copied.
            StagingMismatchError: A tensor moved to other memory meanwhile, or its copy does not match its description.
        """
        with self._lock:
            contents = look_through(state_dict, nested=nested, forms=self._forms)
            budget = self.budget if in_waves and lender is None else None
            return self._copy(contents, budget, free_memory, lender)

    def measure(self, state_dict: Mapping[Any, Any]) -> tuple[int, int]:
        """Measure the copy of a state dict without copying.

        Returns:
            Size in bytes of the memory that the copy takes, and number of bytes of the state dict that do not fit.
        """
        placement = place(sources_of(look_through(state_dict, nested=True, forms={}).tensors), self.budget)
        if self.budget is None or not placement.wave_bytes:
            return placement.nbytes, 0
        return self.budget.nbytes, placement.nbytes - self.budget.nbytes

    def stage_as_it_is(self, state_dict: dict[str, Any]) -> tuple[dict[str, Any], Arena]:
        """Copy a state dict for a custom planner: containers, DTensors and objects keep their types.

        Returns:
            The copy, and the arena that holds its tensors.

        Raises:
            Exception: Any error that `stage` raises.
        """
        arenas: list[Arena] = []

        def copy_tensors(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nodes = tuple([("t", each.dtype, each.shape, each.stride(), False) for each in tensors])
            staged = self._copy(Contents(("l", nodes), [*tensors], [*names]))
            arenas.append(staged.arena)
            return staged_tensors(staged.structure, staged.arena.view())

        with self._lock:
            try:
                return copy_tree(state_dict, copy_tensors), arenas[0]
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
                # By then resident copies may have been written, and changed by a writer of the caller's own.
                later = functools.partial(check, 0)
                staged.waves = WaveSource(contents.tensors, placement, memory, budget, later)
        except BaseException:
            self.pool.give_back(arena)
            raise
        return staged

    def _take(self, nbytes: int, free_memory: Callable[[], object] | None, lender: MemoryLender | None) -> Arena:
        try:
            return self.pool.take(nbytes, lender)
        except StagingLimitError:
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
            placement = place(sources, budget)
            check_placed(contents, sources, placement)
            known = self._adopt(alike, contents, sources, placement, budget)
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
        """Make the cache entry of a new structure, or of one whose tensors have moved."""
        for each in alike:
            if each.placement.key() == placement.key():
                self._known.remove(each)
                return _Known(each.structure, sources, placement, budget)
        offsets, compact = placement.offsets.tolist(), np.asarray(placement.compact).tolist()
        sizes = placement.nbytes, placement.resident_bytes
        structure = Structure(secrets.token_hex(8), contents.skeleton, tuple(offsets), tuple(compact), *sizes)
        return _Known(structure, sources, placement, budget)


def _memory_for(placement: Placement, budget: Budget | None) -> int:
    """Return the size of the arena for a copy; with waves, all of the budget.

    Raises:
        StagingLimitError: What cannot be copied in waves leaves no room for a window.
    """
    if budget is None or not placement.wave_bytes:
        return placement.nbytes
    if placement.resident_bytes + 2 * budget.piece_bytes > budget.nbytes:
        raise StagingLimitError(
            f"{placement.nbytes:,} bytes are to be staged, {placement.resident_bytes:,} of them of tensors below 128 "
            f"KiB, which are not copied in waves; max_staging_bytes allows {budget.nbytes:,} and needs room for both. "
            "Raise it"
        )
    return budget.nbytes
