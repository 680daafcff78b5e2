"""Stock's names of what can be chosen about data files."""

from __future__ import annotations

from enum import Enum

__all__ = ["SerializationFormat"]


class SerializationFormat(Enum):
    """Stock's choice of item format. Source: torch 2.13 `torch.distributed.checkpoint.filesystem`."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"
