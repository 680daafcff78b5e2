"""Read requests for the read items of a load: ranges of bytes to read, and the copies into the template's tensors.

Bytes are read directly into the template's memory if the box is contiguous there and in the file; otherwise they are
read in pieces, from which the elements of the box are copied.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from dcp_core.errors import CorruptCheckpointError, DcpError
from dcp_core.records.plan import ReadItem
from dcp_core.records.protocols import LoadPlanner
from dcp_core.shards.shards import box_view
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.tensors.box_copy import BoxCopy
from dcp_core.tensors.device_copy import DeviceCopies
from dcp_core.tensors.element_copy import copy_elements
from dcp_core.tensors.quantized import copy_quantized
from dcp_core.tensors.tensor_bytes import tensor_bytes
from dcp_io.requests import ReadRequest
from dcp_manifest.index.items import StoredItem
from dcp_manifest.index.runs import box_runs

__all__ = ["direct_memory", "object_request", "tensor_request", "whole_request"]


def tensor_request(
    item: ReadItem,
    stored: PartialItem,
    dtype: torch.dtype,
    sizes: Sequence[int],
    planner: LoadPlanner,
    copies: DeviceCopies,
) -> ReadRequest:
    """Return the read request for a box of a stored chunk of which any range can be read.

    Args:
        item: Read item with the box in the stored chunk, and its place in the template.
        stored: Stored chunk that contains the box.
        dtype: Dtype of the stored elements, as in the index.
        sizes: Sizes of the stored chunk, in elements.
        planner: Load planner, whose `resolve_tensor` returns the tensor to fill, and whose `commit_tensor` is called
            afterwards.
        copies: Copier of pieces into tensors into which bytes cannot be read directly.
    """
    dtype, decoder = stored.dtype or dtype, stored.decoder
    target = _target(item, planner)
    runs = box_runs(sizes, item.storage_offsets, item.lengths, dtype.itemsize)
    key = item.storage_index.fqn
    nbytes = math.prod(sizes) * dtype.itemsize
    into = None if runs.counts else direct_memory(target, dtype)
    if into is not None:

        def commit(_: memoryview) -> None:
            increment_version(target)
            planner.commit_tensor(item, target)

        return ReadRequest(key, stored.item, runs.start, runs.stop, into, commit, decoder=decoder, decoded_bytes=nbytes)
    device = target.device
    copies.prepare(device)
    box = BoxCopy(sizes, dtype, item.storage_offsets, target, copies.copy)

    def done(_: memoryview) -> None:
        copies.finish(device)
        planner.commit_tensor(item, target)

    return ReadRequest(key, stored.item, runs.start, runs.stop, None, done, box.piece, runs, decoder, nbytes)


def direct_memory(target: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return a tensor's memory as bytes if stored elements of `dtype` can be read directly into it, otherwise None."""
    if not (target.is_cpu and target.dtype is dtype and target.is_contiguous() and type(target) is torch.Tensor):
        return None
    return None if target.is_conj() or target.is_neg() else tensor_bytes(target)


def object_request(item: ReadItem, stored: StoredItem, planner: LoadPlanner, decoder: ItemDecoder) -> ReadRequest:
    """Return the read request for an object, which is read as a whole and passed to the planner's `load_bytes`."""
    key = item.storage_index.fqn

    def done(data: memoryview) -> None:
        try:
            planner.load_bytes(item, io.BytesIO(decoder.object(key, stored, data)))
        except CorruptCheckpointError as error:
            if error.file is not None:
                raise
            # The decoder of the object does not know its file and offset.
            message = str(error).removesuffix(f" (key {key!r})")
            raise CorruptCheckpointError(message, file=stored.file, key=key, offset=stored.offset) from error

    return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)


def whole_request(
    items: Sequence[ReadItem],
    stored: StoredItem,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    planner: LoadPlanner,
    decoder: ItemDecoder,
) -> ReadRequest:
    """Return the read request for a stored chunk that must be decoded as a whole, for all items that read from it.

    Args:
        items: Read items for boxes of the chunk; at least one.
        stored: Record of the stored item.
        dtype: Dtype of the stored elements, as in the index.
        sizes: Sizes of the stored chunk, as in the index.
        planner: Load planner, whose `resolve_tensor` returns the tensors to fill, and whose `commit_tensor` is called
            afterwards.
        decoder: Decoder of the stored item.
    """
    key = items[0].storage_index.fqn

    def done(data: memoryview) -> None:
        tensor = decoder.tensor(key, stored, data, dtype, sizes)
        for item in items:
            _copy_part(tensor, item, planner)

    return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item)
    if not target.is_quantized:  # a detached one would keep the quantizer to itself
        target = target.detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise DcpError(
            f"the planner resolved {item.dest_index.fqn!r} to a tensor of sizes {tuple(target.shape)}; "
            f"the read item has {tuple(item.lengths)}"
        )
    return target


def _copy_part(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    target = _target(item, planner)
    part = box_view(tensor, item.storage_offsets, item.lengths, key=item.dest_index.fqn)
    with torch.inference_mode(target.is_inference()):  # a tensor made in that mode is changed in it alone
        if tensor.is_quantized:
            fqn = item.dest_index.fqn
            copy_quantized(fqn, target, part, is_whole=target is getattr(planner, "state_dict", {}).get(fqn))
        else:
            copy_elements(target, part)
    planner.commit_tensor(item, target)
