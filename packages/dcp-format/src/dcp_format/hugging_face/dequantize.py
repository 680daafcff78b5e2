"""Dequantisation of blocks with scales to floating-point tensors. `quantized_reader` reads the files.

Source: OCP Microscaling Formats (MX) 1.0, sections 5.3.3 (E2M1 elements) and 5.4.1 (E8M0 scales); torch 2.13
`torch.distributed.checkpoint.quantized_hf_storage` (order of the two numbers in a byte).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["dequantize_blocks", "dequantize_mxfp4"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SCALE_BIAS = 127


def dequantize_blocks(
    values: torch.Tensor, scales: torch.Tensor, block_size: int, offsets: Sequence[int]
) -> torch.Tensor:
    """Dequantise a box of a matrix whose square blocks share a scale.

    Args:
        values: Quantised elements of the box, a matrix of any floating-point or integer dtype.
        scales: Scales of the blocks that overlap the box, one per block.
        block_size: Number of rows and columns of a block.
        offsets: Row and column of the box's first element within its block.

    Returns:
        Float32 tensor with the sizes of the box.
    """
    wide = scales.to(torch.float32)
    for dim, (offset, length) in enumerate(zip(offsets, values.shape, strict=True)):
        wide = wide.repeat_interleave(block_size, dim).narrow(dim, offset, length)
    return values.to(torch.float32) * wide


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise MXFP4: 4-bit numbers, two per byte (low half first), with a power of two as the scale of each block.

    Args:
        blocks: Tensor of uint8, with sizes (…, G, B): G blocks of B bytes in each row.
        scales: Exponents of the blocks' scales, with a bias of 127: tensor of uint8, with sizes (…, G).

    Returns:
        Float32 tensor, with sizes (…, G × B × 2).
    """
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device="cpu")
    pairs = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1)
    exponents = scales.to(torch.int32) - _SCALE_BIAS
    values = torch.ldexp(table[pairs.to(torch.int64)], exponents[..., None, None])
    return values.reshape(*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1] * 2)
