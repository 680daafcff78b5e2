"""Checks of a copy: a wrong description would save wrong tensors with valid checksums.

The mutation guard compares sampled bytes; it detects an optimizer step, but maybe not the change of a few elements.
"""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass

import torch

from dcp_async.errors import StagingMismatchError
from dcp_async.staging.placement import Placement, Sources
from dcp_async.staging.skeleton import Contents, leaves_of


def check_described(contents: Contents, sources: Sources) -> None:
    """Raise StagingMismatchError if a tensor does not match its skeleton, or has moved."""
    leaves = [*leaves_of(contents.skeleton)]
    if len(leaves) != len(contents.tensors):
        raise StagingMismatchError(f"{len(contents.tensors)} tensors were staged, {len(leaves)} described; {_REMEDY}")
    rows = zip(leaves, contents.tensors, sources.addresses.tolist(), strict=True)
    for row, ((dtype, shape, strides), tensor, address) in enumerate(rows):
        same = tensor.dtype is dtype and tensor.shape == shape and tensor.stride() == strides
        if not (same and tensor.data_ptr() == address):
            raise StagingMismatchError(
                f"{contents.names[row]!r} is described as {_text(dtype, shape, strides)} at {address:#x}, but the "
                f"copy is {_text(tensor.dtype, tensor.shape, tensor.stride())} at {tensor.data_ptr():#x}; {_REMEDY}"
            )


_REMEDY = (
    "nothing was saved. A tensor may be given other memory (`param.data = …`, offloading) only once its copy is "
    "complete; if it was not, this is a defect of dcp-async: use `dcp_core.save` and report it"
)


def _text(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} with strides {tuple(strides)}"


_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Samples:
    """Sampled bytes of tensors before the copy."""

    taken: list[tuple[str, int, int, bytes]]
    """Name of the tensor, memory address, byte offset in the arena, sampled bytes."""

    def check(self, memory: torch.Tensor, resident_bytes: int) -> None:
        """Raise StagingMismatchError if a tensor, or its copy before `resident_bytes`, differs from its sample."""
        begin = memory.data_ptr()
        for name, source, offset, before in self.taken:
            places = (source, begin + offset if offset < resident_bytes else source)
            now, copied = (ctypes.string_at(at, len(before)) for at in places)
            if not now == copied == before:
                raise StagingMismatchError(
                    f"{name!r} was changed while it was copied for an asynchronous save, so the copy is not used: wait "
                    "for staging before you change values (`with saver.lock(): optimizer.step()`, or the response's "
                    "staging_completion.result())"
                )


class MutationGuard:
    """Samples up to 64 bytes at random positions of at most `samples` contiguous tensors in host memory."""

    def __init__(self, samples: int = 64) -> None:
        self._samples = samples
        self._random = random.Random(0)  # noqa: S311 - which places are looked at is no secret

    def sample(self, contents: Contents, placement: Placement) -> Samples:
        """Sample some tensors, for `Samples.check` after the copy."""
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
