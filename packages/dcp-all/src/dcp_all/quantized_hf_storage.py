"""Mirror of `torch.distributed.checkpoint.quantized_hf_storage`: re-exports only."""

from dcp_format.quantized_reader import QuantizedHuggingFaceStorageReader

__all__ = ["QuantizedHuggingFaceStorageReader"]
