"""Bit-by-bit comparison of nested state dicts."""

from __future__ import annotations

from typing import Any

import torch

from dcp_core.planning.replicas import same_value

__all__ = ["same"]


def same(actual: Any, wanted: Any) -> bool:
    """Return whether nested containers are equal: tensors by dtype, shape and bits, objects by type and bits."""
    if isinstance(wanted, torch.Tensor):
        return (
            isinstance(actual, torch.Tensor)
            and (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
            and torch.equal(_bits(actual), _bits(wanted))
        )
    if isinstance(wanted, dict):
        return actual.keys() == wanted.keys() and all(same(actual[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return (
            type(actual) is type(wanted)
            and len(actual) == len(wanted)
            and all(same(one, other) for one, other in zip(actual, wanted, strict=True))
        )
    return same_value(actual, wanted)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
