"""Mirror of `torch.distributed.checkpoint._consolidate_hf_safetensors`: re-exports only."""

from dcp_format.hugging_face.consolidate import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)

__all__ = ["consolidate_safetensors_files", "consolidate_safetensors_files_on_every_rank"]
