"""Stock's names of item formats."""

from __future__ import annotations

from enum import Enum

__all__ = ["SerializationFormat", "check_format"]


class SerializationFormat(Enum):
    """Stock's choice of item format. Source: torch 2.13 `torch.distributed.checkpoint.filesystem`."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_format(serialization_format: Enum) -> None:
    """Refuse item formats but `TORCH_SAVE`; compares by value, since the enums of other packages mean the same."""
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise ValueError(
            f"serialization_format={serialization_format} is not supported: files so written cannot be loaded "
            "again; use layout='raw' for plain bytes"
        )
