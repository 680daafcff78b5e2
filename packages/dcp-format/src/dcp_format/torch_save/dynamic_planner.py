"""`DynamicMetaLoadPlanner`: a load planner that makes the metadata from the template, for files without metadata.

Source: torch 2.13 `torch.distributed.checkpoint.format_utils.DynamicMetaLoadPlanner`.
"""

from __future__ import annotations

from typing import Any

import torch

from dcp_core import ChunkStorageMetadata, DefaultLoadPlanner, Metadata, TensorProperties, TensorStorageMetadata
from dcp_core.errors import UnsupportedValueError
from dcp_core.toolkit import flatten

__all__ = ["DynamicMetaLoadPlanner"]


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """Load planner that makes the metadata from the template: one chunk per tensor, with the template's dtype and size.

    Example:
        ```python
        import torch
        from dcp_core import load
        from dcp_format import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

        torch.save({"weight": torch.ones(3)}, "model.pt")
        state = {"weight": torch.zeros(3)}
        load(state, storage_reader=BroadcastingTorchSaveReader("model.pt"), planner=DynamicMetaLoadPlanner())
        ```
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Make metadata from the template; `metadata` is ignored.

        Raises:
            UnsupportedValueError: The template holds a value other than a tensor.
        """
        del metadata
        values = flatten(state_dict).values if self.flatten_state_dict else state_dict
        others = sorted(name for name, value in values.items() if not isinstance(value, torch.Tensor))
        if others:
            raise UnsupportedValueError(
                f"only tensors are loaded this way, not {others[:8]}: take them out of the template, or "
                "convert the file with torch_save_to_dcp and load the checkpoint"
            )
        entries = {name: _entry(value) for name, value in values.items()}
        super().set_up_planner(state_dict, Metadata(dict(entries)), is_coordinator)


def _entry(tensor: torch.Tensor) -> TensorStorageMetadata:
    """Return metadata with one chunk for the whole tensor; global sizes for a DTensor."""
    size = tensor.size()
    chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), size, [chunk])
