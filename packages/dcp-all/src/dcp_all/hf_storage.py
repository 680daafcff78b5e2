"""Mirror of `torch.distributed.checkpoint.hf_storage`: re-exports only."""

from dcp_format.hf_reader import HuggingFaceStorageReader
from dcp_format.hf_writer import HuggingFaceStorageWriter

__all__ = ["HuggingFaceStorageReader", "HuggingFaceStorageWriter"]
