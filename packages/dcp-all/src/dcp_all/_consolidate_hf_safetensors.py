"""Mirror of `torch.distributed.checkpoint._consolidate_hf_safetensors`: re-exports only."""

from dcp_format.hugging_face.consolidate import consolidate_safetensors_files as consolidate_safetensors_files
from dcp_format.hugging_face.consolidate import (
    consolidate_safetensors_files_on_every_rank as consolidate_safetensors_files_on_every_rank,
)
