"""Quantized tensors (`torch.qint8`, …): serialization with the quantizer, parts, and copies.

A quantizer consists of scheme, scale and zero point, or of scales and zero points for each channel.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch

from dcp_core.errors import UnsupportedValueError

__all__ = ["archive_quantized", "check_divisible", "copy_quantized", "empty_like_part", "is_quantized_dtype"]

_DTYPES = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_OF_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_OF_CHANNELS = (torch.per_channel_affine, torch.per_channel_symmetric)


def is_quantized_dtype(dtype: torch.dtype) -> bool:
    """Return whether a dtype is quantized, such as `torch.qint8`."""
    return dtype in _DTYPES


def archive_quantized(key: str, tensor: torch.Tensor) -> io.BytesIO:
    """Return a `torch.save` archive of a quantized tensor with its quantizer; of a view, only the view's elements.

    Args:
        key: FQN of the tensor, for error messages.
        tensor: Quantized tensor, or a view of a quantized tensor, on any device.

    Raises:
        UnsupportedValueError: The tensor has no quantizer.
    """
    scheme = _scheme(tensor)
    if scheme is None:
        raise UnsupportedValueError(
            f"{key!r} has the dtype {tensor.dtype} and no quantizer (as torch.empty makes it): nothing says what its "
            "integers mean; save what a quantizing function returned, or its `int_repr()`"
        )
    tensor = tensor.detach().cpu()
    if scheme in _OF_TENSOR + _OF_CHANNELS:  # torch cannot clone others, nor make parts of them
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer


def check_divisible(key: str, tensor: torch.Tensor) -> None:
    """Raise if torch cannot make views of boxes of a quantized tensor.

    Args:
        key: FQN of the tensor, for error messages.
        tensor: Tensor of any dtype.

    Raises:
        UnsupportedValueError: The tensor has no quantizer, or a quantizer with floating-point zero points.
    """
    if not tensor.is_quantized:
        return
    scheme = _scheme(tensor)
    if scheme not in _OF_TENSOR + _OF_CHANNELS:
        what = "no quantizer" if scheme is None else f"the scheme {scheme}"
        raise UnsupportedValueError(
            f"{key!r} is saved or loaded in several parts, and its tensor of dtype {tensor.dtype} has {what}, which "
            "torch cannot divide; use tensors that are quantized per tensor or per channel as the stored parts are, "
            "also as the template, or dequantize before saving"
        )


def empty_like_part(key: str, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return an empty quantized tensor of the global sizes, with the quantizer of this rank's shard.

    Args:
        key: FQN of the tensor, for error messages.
        part: Shard of the tensor on this rank, also without elements; it may have other sizes than the global tensor.
        sizes: Sizes of the global tensor, which has no elements.

    Returns:
        The global tensor; `part` itself if the sizes are equal.

    Raises:
        UnsupportedValueError: The shard has scales for its own channels only.
    """
    if tuple(part.shape) == tuple(sizes):
        return part.detach()
    if not part.is_quantized:
        return part.new_empty(sizes)
    scheme = _scheme(part)
    # `new_empty` and the like return a tensor without a quantizer, or none at all.
    if scheme in _OF_TENSOR:
        return torch._empty_affine_quantized(  # noqa: SLF001
            tuple(sizes), scale=part.q_scale(), zero_point=part.q_zero_point(), dtype=part.dtype, device=part.device
        )
    if scheme in _OF_CHANNELS and part.size(part.q_per_channel_axis()) == sizes[part.q_per_channel_axis()]:
        return torch._empty_per_channel_affine_quantized(  # noqa: SLF001
            tuple(sizes),
            scales=part.q_per_channel_scales(),
            zero_points=part.q_per_channel_zero_points(),
            axis=part.q_per_channel_axis(),
            dtype=part.dtype,
            device=part.device,
        )
    raise UnsupportedValueError(
        f"{key!r} has no elements, and its quantizer ({scheme}) is sharded: no rank has all of it; replicate the "
        "tensor before saving, or leave it out"
    )


def copy_quantized(key: str, target: torch.Tensor, source: torch.Tensor, *, is_whole: bool) -> None:
    """Copy a stored quantized tensor, with scale and zero point, into a tensor of the template.

    Args:
        key: FQN of the tensor, for error messages.
        target: Tensor with the sizes of `source`. A whole tensor without a quantizer, from
            `torch.empty(…, dtype=torch.qint8)`, shares the memory of `source` afterwards.
        source: Stored tensor, on the CPU.
        is_whole: Whether `target` is a whole tensor of the template, whose scale can be changed, not a view of a part.

    Raises:
        UnsupportedValueError: The target is quantized by another scheme, or is a part and has another scale.
    """
    with torch.no_grad():
        if not target.is_quantized:
            target.copy_(source.dequantize())
            return
        wanted, found = _parameters(source), _parameters(target)
        if is_whole and not found:
            target.data = source.to(target.device)
            return
        if wanted != found and not (is_whole and wanted["scheme"] == found["scheme"]):
            raise UnsupportedValueError(
                f"{key!r} is stored quantized with {wanted}, and the template's tensor with {found}; load into a whole "
                "tensor of the stored scheme, or into a floating-point one with allow_lossy_casts=True"
            )
        target.copy_(source)


def _parameters(tensor: torch.Tensor) -> dict[str, object]:
    """Return the quantization parameters of a tensor (scheme, scale, zero point); empty without a quantizer."""
    scheme = _scheme(tensor)
    if scheme is None:
        return {}
    if scheme in _OF_TENSOR:
        return {"scheme": scheme, "scale": tensor.q_scale(), "zero point": tensor.q_zero_point()}
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return {
        "scheme": scheme,
        "axis": tensor.q_per_channel_axis(),
        "scales": scales.tolist(),
        "zero points": points.tolist(),
    }


def _scheme(tensor: torch.Tensor) -> torch.qscheme | None:
    """Return the quantization scheme; None for a tensor that has no quantizer yet."""
    try:
        return tensor.qscheme()
    except RuntimeError:
        return None
