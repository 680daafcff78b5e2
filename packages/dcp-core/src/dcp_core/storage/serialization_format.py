"""Stock's enum `SerializationFormat` for the format of items in data files; only `TORCH_SAVE` is supported.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.SerializationFormat`.
"""

from __future__ import annotations

from enum import Enum

__all__ = ["SerializationFormat", "check_format"]


class SerializationFormat(Enum):
    """Format of the items in data files, as in stock."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_format(serialization_format: Enum) -> None:
    """Check that the item format is `TORCH_SAVE`, also as a member of stock's enum; raises ValueError if not."""
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise ValueError(
            f"serialization_format={serialization_format} is not supported: files so written cannot be loaded "
            "again; use layout='raw' for plain bytes"
        )
