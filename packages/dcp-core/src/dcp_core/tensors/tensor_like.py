"""`TensorLike`: base of records that are treated as tensors in a state dict."""

from __future__ import annotations

__all__ = ["TensorLike"]


class TensorLike:
    """Base class of records that stand for a tensor in a state dict; a search for tensors finds these, too."""

    __slots__ = ()
