"""Self-check of staging: verifies that each staged tensor matches its recorded dtype, shape, strides and memory.

A copy consists of bytes in an arena and a separate description (dtype, shape, strides). With a wrong description, wrong
tensors would be saved with valid checksums. The checks compare descriptions and addresses, and never read the bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from dcp_async.errors import StagingMismatchError
from dcp_async.staging.placement import I64, Placement, Sources
from dcp_async.staging.skeleton import Contents, leaves_of
from dcp_core.toolkit import check_memory

__all__ = ["check_described", "check_placed"]

Flags = npt.NDArray[np.bool_]


def check_described(contents: Contents, sources: Sources) -> None:
    """Check that tensors still match their description in the skeleton, and that they have not moved in memory.

    Args:
        contents: Tensors that were copied, with their skeleton.
        sources: Memory extents of the tensors, as recorded before the copy.

    Raises:
        StagingMismatchError: A tensor has another dtype, shape or strides than in the skeleton, or moved in memory.
    """
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


def check_placed(contents: Contents, sources: Sources, placement: Placement) -> None:
    """Check a layout before copying: each copy lies inside the arena, is aligned, and includes all bytes of its tensor.

    Args:
        contents: Tensors to copy, with their names.
        sources: Memory extents of the tensors.
        placement: Layout of the copies in the arena.

    Raises:
        UnsupportedValueError: The storage of a tensor is smaller than the tensor's shape and strides require.
        StagingMismatchError: The layout is wrong.
    """
    for row in sources.without_memory():
        check_memory(contents.names[row], contents.tensors[row])
    ends = placement.offsets + np.where(placement.compact, sources.element_bytes, sources.extents)
    wrong = (placement.offsets % sources.item_bytes != 0) | (ends > placement.nbytes)
    copied = (sources.extents > 0) & (placement.offsets < placement.resident_bytes)
    wrong |= copied & (ends > placement.resident_bytes)
    by_piece = copied.copy()
    by_piece[placement.by_tensor] = False
    wrong |= (placement.compact == by_piece) & copied & (sources.devices == 0)
    rows = np.flatnonzero(by_piece)
    wrong[rows] |= ~_in_pieces(sources.addresses[rows], placement.offsets[rows], ends[rows], placement)
    wrong |= _in_others(placement, ends)
    if wrong.any():
        name = contents.names[int(np.flatnonzero(wrong)[0])]
        raise StagingMismatchError(f"{name!r} would be copied to a wrong location; {_REMEDY}")


def _in_pieces(addresses: I64, offsets: I64, ends: I64, placement: Placement) -> Flags:
    """Whether each copy is part of a piece that is copied unchanged, and comes from its own source address."""
    begins, places, lengths = placement.pieces
    if not len(places):
        return np.zeros(len(offsets), bool)
    piece = np.searchsorted(places, offsets, "right") - 1
    own = offsets - places[piece] == addresses - begins[piece]
    found: Flags = (piece >= 0) & own & (ends <= (places + lengths)[piece])
    return found


def _in_others(placement: Placement, ends: I64) -> Flags:
    """Whether each tensor that is copied by itself overlaps another such copy, or a piece."""
    compact = np.flatnonzero(placement.compact & (placement.offsets < placement.resident_bytes))
    begins = np.concatenate([placement.pieces[1], placement.offsets[compact]])
    until = np.concatenate([placement.pieces[1] + placement.pieces[2], ends[compact]])
    order = np.argsort(begins, kind="stable")
    clash = begins[order][1:] < until[order][:-1]
    found: Flags = np.isin(placement.offsets, begins[order][1:][clash])
    return found


_REMEDY = (
    "nothing was saved. A tensor may be given other memory (`param.data = …`, offloading) only once its copy is "
    "complete; if it was not, this is a defect of dcp-async: use `dcp_core.save` and report it"
)


def _text(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} with strides {tuple(strides)}"
