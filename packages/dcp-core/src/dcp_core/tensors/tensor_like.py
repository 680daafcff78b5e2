"""What state dicts hold besides `torch.Tensor` that is to be taken for a tensor."""

from __future__ import annotations

__all__ = ["TensorLike"]


class TensorLike:
    """Base of records that stand for a tensor in a state dict; whoever looks for tensors looks for these, too."""

    __slots__ = ()
