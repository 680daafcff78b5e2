"""Other checkpoint formats: loads, saves and converts `torch.save` files and safetensors in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_format.content.content import Content as Content
    from dcp_format.content.content import TensorEntry as TensorEntry
    from dcp_format.content.content import WriteOptions as WriteOptions
    from dcp_format.conversion import Conversion as Conversion
    from dcp_format.conversion import convert as convert
    from dcp_format.converters import Converter as Converter
    from dcp_format.export.safetensors_writer import SafetensorsWriter as SafetensorsWriter
    from dcp_format.export.safetensors_writer import save_safetensors as save_safetensors
    from dcp_format.hugging_face.consolidate import (
        consolidate_safetensors_files_on_every_rank as consolidate_safetensors_files_on_every_rank,
    )
    from dcp_format.hugging_face.hf_reader import HuggingFaceStorageReader as HuggingFaceStorageReader
    from dcp_format.hugging_face.hf_reader import QuantizedHuggingFaceStorageReader as QuantizedHuggingFaceStorageReader
    from dcp_format.hugging_face.hf_writer import HuggingFaceStorageWriter as HuggingFaceStorageWriter
    from dcp_format.torch_save.broadcasting_reader import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
    from dcp_format.torch_save.broadcasting_reader import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
    from dcp_format.torch_save.stock_calls import dcp_to_torch_save as dcp_to_torch_save
    from dcp_format.torch_save.stock_calls import torch_save_to_dcp as torch_save_to_dcp

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
