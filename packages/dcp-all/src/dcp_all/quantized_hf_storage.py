"""Mirror of `torch.distributed.checkpoint.quantized_hf_storage`: re-exports only."""

from dcp_all.hf_storage import HuggingFaceStorageReader as HuggingFaceStorageReader
from dcp_all.metadata import TensorStorageMetadata as TensorStorageMetadata
from dcp_all.planner import LoadPlanner as LoadPlanner
from dcp_all.planner import ReadItem as ReadItem
from dcp_format.hugging_face.hf_reader import QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader
