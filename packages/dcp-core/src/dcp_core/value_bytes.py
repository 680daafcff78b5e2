"""Bytes that tell values apart, and nothing else about them: equal for equal values of plain types.

A pickle also says which parts of a value are one object; there, ranks differ that hold the same.
"""

from __future__ import annotations

import io
import marshal
import pickle
from typing import Any

import torch

from dcp_core.payloads import tensor_bytes

__all__ = ["value_bytes"]


def value_bytes(value: Any) -> bytes:
    """What tells a value from others.

    Args:
        value: Plain values and containers of them take little time; anything that can be pickled will do.

    Raises:
        Exception: It cannot be pickled, or contains itself.
    """
    try:
        return marshal.dumps(value, 2)  # later versions, too, say which parts are one object
    except ValueError:
        into = io.BytesIO()
        _Pickler(into).dump(value)
        return into.getvalue()


class _Pickler(pickle.Pickler):
    """Repeats what occurs twice, and looks at the elements of tensors rather than at where they are."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.fast = True

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or obj.is_quantized:
            return None
        plain = obj.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return type(obj).__name__, str(obj.dtype), tuple(obj.shape), bytes(tensor_bytes(plain))
