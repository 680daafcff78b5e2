"""`TensorLike`: base class of records that are treated as tensors in a state dict."""

from __future__ import annotations

__all__ = ["TensorLike"]


class TensorLike:
    """Base class of records that replace a tensor in a state dict, and that flattening treats as tensors."""

    __slots__ = ()
