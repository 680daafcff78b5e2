"""Other checkpoint formats: loads, saves and converts `torch.save` files and safetensors in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_format.content.content import Content, TensorEntry, WriteOptions
    from dcp_format.conversion import Conversion, convert
    from dcp_format.converters import Converter
    from dcp_format.export.safetensors_writer import SafetensorsWriter, save_safetensors
    from dcp_format.hugging_face.consolidate import consolidate_safetensors_files_on_every_rank
    from dcp_format.hugging_face.hf_reader import HuggingFaceStorageReader, QuantizedHuggingFaceStorageReader
    from dcp_format.hugging_face.hf_writer import HuggingFaceStorageWriter
    from dcp_format.torch_save.broadcasting_reader import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
    from dcp_format.torch_save.stock_calls import dcp_to_torch_save, torch_save_to_dcp

__all__ = [
    "BroadcastingTorchSaveReader",
    "Content",
    "Conversion",
    "Converter",
    "DynamicMetaLoadPlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "SafetensorsWriter",
    "TensorEntry",
    "WriteOptions",
    "consolidate_safetensors_files_on_every_rank",
    "convert",
    "dcp_to_torch_save",
    "save_safetensors",
    "torch_save_to_dcp",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_format.content.content": ("Content", "TensorEntry", "WriteOptions"),
        "dcp_format.conversion": ("Conversion", "convert"),
        "dcp_format.converters": ("Converter",),
        "dcp_format.export.safetensors_writer": ("SafetensorsWriter", "save_safetensors"),
        "dcp_format.hugging_face.consolidate": ("consolidate_safetensors_files_on_every_rank",),
        "dcp_format.hugging_face.hf_reader": ("HuggingFaceStorageReader", "QuantizedHuggingFaceStorageReader"),
        "dcp_format.hugging_face.hf_writer": ("HuggingFaceStorageWriter",),
        "dcp_format.torch_save.broadcasting_reader": ("BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner"),
        "dcp_format.torch_save.stock_calls": ("dcp_to_torch_save", "torch_save_to_dcp"),
    },
)
