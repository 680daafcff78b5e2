"""Stock's `SerializationFormat` of the items in data files, of whose formats one is supported.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.SerializationFormat`.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["SerializationFormat", "check_format"]


class SerializationFormat(Enum):
    """Stock's choice of item format."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_format(serialization_format: Enum) -> None:
    """Raise ValueError for item formats other than `TORCH_SAVE`; compares values, so stock's enum is accepted."""
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise ValueError(
            f"serialization_format={serialization_format} is not supported: files so written cannot be loaded "
            "again; use layout='raw' for plain bytes"
        )
