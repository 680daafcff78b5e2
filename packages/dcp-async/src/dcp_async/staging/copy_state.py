"""`Stager`: splits a state dict into skeleton (structure) and tensors, and copies the tensors into an arena.

The structure is cached: the next save of a state dict with the same structure takes little longer than the copy.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_async.staging.arena import Arena, ArenaPool
from dcp_async.staging.copying import Copier, arena_view, copied_strides
from dcp_async.staging.mutation_guard import MutationGuard
from dcp_async.staging.placement import Placement, Sources, place, sources_of
from dcp_async.staging.self_check import check_described, check_placed
from dcp_async.staging.skeleton import Contents, Skeleton, fill, leaves_of, look_through
from dcp_async.staging.tree_copy import copy_tree

__all__ = ["Staged", "Stager", "Structure", "staged_tensors"]

_KEPT_STRUCTURES = 16


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Structure of a staged state dict: skeleton, and the layout of the tensors in the arena, but no tensors.

    Attributes:
        identifier: Text that identifies the structure in messages to a worker process.
        skeleton: Nesting, keys, dtypes and shapes of the state dict.
        compact: For each tensor, whether its copy is contiguous instead of having the tensor's strides.
        nbytes: Number of bytes of the arena that the copies take.
    """

    identifier: str
    skeleton: Skeleton
    offsets: tuple[int, ...]
    """Offset of each tensor in the arena, in bytes."""
    compact: tuple[bool, ...]
    nbytes: int


@dataclass(slots=True)
class Staged:
    """Staged copy of one state dict: structure, arena with the tensors, and objects."""

    structure: Structure
    arena: Arena
    objects: list[Any]

    def state_dict(self) -> dict[Any, Any]:
        """Return the copy as a state dict whose tensors are views of the arena."""
        tensors = iter(staged_tensors(self.structure, self.arena.view()))
        return fill(self.structure.skeleton, tensors, iter(self.objects))


def staged_tensors(structure: Structure, memory: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a structure describes, as views of an arena's memory."""
    described = zip(leaves_of(structure.skeleton), structure.offsets, structure.compact, strict=True)
    return [
        arena_view(memory, offset, dtype, shape, copied_strides(shape, strides, compact=compact))
        for (dtype, shape, strides), offset, compact in described
    ]


@dataclass(slots=True, eq=False)
class _Known:
    """Cache entry: a structure, and where its tensors were when it was last staged."""

    structure: Structure
    sources: Sources
    placement: Placement


@dataclass(slots=True)
class Stager:
    """Stager that copies state dicts into arenas (reusable memory buffers).

    Args:
        pool: Pool of the arenas.
        copier: Copier of the tensors.
        guard: Guard that detects tensors that change during the copy; None for no guard.
    """

    pool: ArenaPool
    copier: Copier
    guard: MutationGuard | None = None
    _known: list[_Known] = field(default_factory=list)
    _forms: dict[Hashable, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def stage(self, state_dict: Mapping[Any, Any], *, nested: bool = True) -> Staged:
        """Copy a state dict into an arena; the copy is complete on return.

        Args:
            state_dict: State dict to copy.
            nested: Whether nested containers are split; with False, each top-level container is copied as one object.

        Raises:
            UnsupportedValueError: A tensor or object cannot be saved.
            StagingLimitError: The copy would exceed the memory limit of staging.
            MutatedWhileStagedError: A tensor changed while it was copied.
            StagingMismatchError: A tensor moved to other memory meanwhile, or its copy does not match its description.
        """
        with self._lock:
            return self._copy(look_through(state_dict, nested=nested, forms=self._forms))

    def measure(self, state_dict: Mapping[Any, Any]) -> int:
        """Return the size in bytes of the arena memory that a copy of a state dict takes, without copying."""
        return place(sources_of(look_through(state_dict, nested=True, forms={}).tensors)).nbytes

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

    def _copy(self, contents: Contents) -> Staged:
        known = self._find(contents)
        arena = self.pool.take(known.placement.nbytes)
        try:
            memory = arena.view()
            samples = None if self.guard is None else self.guard.sample(contents, known.placement)
            self.copier.copy(known.placement, contents.tensors, memory)
            check_described(contents, known.sources)
            if samples is not None:
                samples.check(memory)
        except BaseException:
            self.pool.give_back(arena)
            raise
        return Staged(known.structure, arena, contents.objects)

    def _find(self, contents: Contents) -> _Known:
        sources = sources_of(contents.tensors)
        known = next((each for each in self._known if each.structure.skeleton == contents.skeleton), None)
        if known is not None and known.sources.same_as(sources):
            self._known.remove(known)
        else:
            placement = place(sources)
            check_placed(contents, sources, placement)
            known = self._adopt(contents, sources, placement)
        self._known.append(known)
        del self._known[:-_KEPT_STRUCTURES]
        return known

    def _adopt(self, contents: Contents, sources: Sources, placement: Placement) -> _Known:
        """Make the cache entry of a new structure, or of one whose tensors have moved."""
        for each in self._known:
            if each.structure.skeleton == contents.skeleton and each.placement.key() == placement.key():
                self._known.remove(each)
                return _Known(each.structure, sources, placement)
        offsets, compact = placement.offsets.tolist(), np.asarray(placement.compact).tolist()
        structure = Structure(secrets.token_hex(8), contents.skeleton, tuple(offsets), tuple(compact), placement.nbytes)
        return _Known(structure, sources, placement)
