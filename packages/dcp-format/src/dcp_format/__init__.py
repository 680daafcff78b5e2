"""Other formats: `torch.save` files and Hugging Face safetensors, loaded, saved and converted in bounded memory.

Checkpoints themselves are planned in `dcp_core` and stored by `dcp_fs` and others.
"""

from dcp_format.content.content import Content, TensorEntry
from dcp_format.convert import convert, open_content
from dcp_format.converters import Converter, WriteOptions, converter_for, detect
from dcp_format.hugging_face.consolidate import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from dcp_format.hugging_face.hf_reader import HuggingFaceStorageReader
from dcp_format.hugging_face.hf_writer import HuggingFaceStorageWriter
from dcp_format.hugging_face.quantized_reader import QuantizedHuggingFaceStorageReader
from dcp_format.torch_save.broadcasting_reader import BroadcastingTorchSaveReader
from dcp_format.torch_save.dynamic_planner import DynamicMetaLoadPlanner
from dcp_format.torch_save.stock_calls import dcp_to_torch_save, torch_save_to_dcp

__all__ = [
    "BroadcastingTorchSaveReader",
    "Content",
    "Converter",
    "DynamicMetaLoadPlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "TensorEntry",
    "WriteOptions",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "convert",
    "converter_for",
    "dcp_to_torch_save",
    "detect",
    "open_content",
    "torch_save_to_dcp",
]
