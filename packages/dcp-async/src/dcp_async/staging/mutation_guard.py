"""Mutation guard of staging: detects tensors that change during the copy, by comparing sampled bytes.

A sample takes microseconds, so the guard can always be on. Only changes of sampled bytes are detected: an optimizer
step is detected, but a change of a few elements of one tensor may not be.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass

import torch

from dcp_async.errors import MutatedWhileStagedError
from dcp_async.staging.placement import Placement
from dcp_async.staging.skeleton import Contents

__all__ = ["MutationGuard", "Samples"]

_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled bytes of tensors, taken before they were copied."""

    taken: list[tuple[str, int, int, bytes]]
    """One tuple per sample: name of the tensor, memory address, byte offset in the arena, sampled bytes."""

    def check(self, memory: torch.Tensor, resident_bytes: int) -> None:
        """Compare the samples with the bytes that the tensors and their copies have now.

        Args:
            memory: The arena's memory, which contains the copies.
            resident_bytes: Offset behind which there are no copies in the arena; of those tensors, only the bytes that
                they have now are compared.

        Raises:
            MutatedWhileStagedError: A tensor or its copy differs from the sample.
        """
        begin = memory.data_ptr()
        for name, source, offset, before in self.taken:
            places = (source, begin + offset if offset < resident_bytes else source)
            now, copied = (ctypes.string_at(at, len(before)) for at in places)
            if not now == copied == before:
                raise MutatedWhileStagedError(
                    f"{name!r} was changed while it was copied for an asynchronous save, so the copy is not used: wait "
                    "for staging before you change values (`with saver.lock(): optimizer.step()`, or the response's "
                    "staging_completion.result())"
                )


class MutationGuard:
    """Mutation guard of a stager: `sample` before the copy, and `Samples.check` after it, detect changed tensors.

    Each sample is up to 64 bytes at a random place of a contiguous tensor in host memory; other tensors are not
    sampled.

    Args:
        samples: Largest number of tensors to sample in each save; each save chooses them anew at random.
    """

    def __init__(self, samples: int = 64) -> None:
        self._samples = samples
        self._random = random.Random(0)  # noqa: S311 - which places are looked at is no secret

    def sample(self, contents: Contents, placement: Placement) -> Samples:
        """Return samples of the current bytes of some tensors; call their `check` when the copy is complete.

        Args:
            contents: Tensors that will be copied, with their names.
            placement: Layout of the copies in the arena.
        """
        tensors = contents.tensors
        rows = self._random.sample(range(len(tensors)), min(self._samples, len(tensors)))
        taken = []
        for row in rows:
            tensor = tensors[row]
            if not (tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes):
                continue
            at = self._random.randrange(max(1, tensor.nbytes - _SAMPLE_BYTES + 1))
            address = tensor.data_ptr() + at
            data = ctypes.string_at(address, min(_SAMPLE_BYTES, tensor.nbytes - at))
            taken.append((contents.names[row], address, int(placement.offsets[row]) + at, data))
        return Samples(taken)
