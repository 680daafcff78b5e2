"""Copy of quantized tensors (`torch.qint8`, …) with their quantizer: their integers mean nothing without it."""

from __future__ import annotations

import torch

from dcp_core.errors import UnsupportedValueError

__all__ = ["copy_quantized"]


def copy_quantized(key: str, target: torch.Tensor, source: torch.Tensor, *, is_whole: bool) -> None:
    """Copy a stored quantized tensor, scale and zero point included, into a tensor of the template.

    Args:
        key: FQN, for messages.
        target: Of the source's sizes. A whole one without a quantizer (`torch.empty(…, dtype=torch.qint8)`) gets the
            source's memory.
        source: On the CPU.
        is_whole: Whether `target` is the template's own tensor, which can be given another scale; parts of one cannot.

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
    """Scheme, scale and zero point; nothing for a tensor that has no quantizer yet."""
    try:
        scheme = tensor.qscheme()
    except RuntimeError:
        return {}
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return {"scheme": scheme, "scale": tensor.q_scale(), "zero point": tensor.q_zero_point()}
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return {
        "scheme": scheme,
        "axis": tensor.q_per_channel_axis(),
        "scales": scales.tolist(),
        "zero points": points.tolist(),
    }
