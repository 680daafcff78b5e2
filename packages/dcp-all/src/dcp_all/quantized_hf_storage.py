"""Mirror of `torch.distributed.checkpoint.quantized_hf_storage`: re-exports only."""

from dcp_all.hf_storage import HuggingFaceStorageReader
from dcp_all.metadata import TensorStorageMetadata
from dcp_all.planner import LoadPlanner, ReadItem
from dcp_format.hugging_face.hf_reader import QuantizedHuggingFaceStorageReader

__all__ = [
    "HuggingFaceStorageReader",
    "LoadPlanner",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "TensorStorageMetadata",
]
