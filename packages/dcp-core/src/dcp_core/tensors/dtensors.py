"""Detection of DTensors without importing `torch.distributed.tensor`, which takes a third as long as `import torch`.

A process without DTensors, such as the worker process of an asynchronous saver, never needs this import.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor"]

_MODULE = "torch.distributed.tensor"


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether an object is a DTensor; False if `torch.distributed.tensor` has not been imported."""
    module = sys.modules.get(_MODULE)
    kind = None if module is None else getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)
