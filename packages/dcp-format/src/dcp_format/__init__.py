"""Other checkpoint formats: loads, saves and converts `torch.save` files and safetensors in bounded memory.

Checkpoints in this project's own format are planned in `dcp_core`, and stored by `dcp_fs` and other packages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_format.content.content import Content, TensorEntry
    from dcp_format.content.write_options import WriteOptions
    from dcp_format.conversion import Conversion, convert, open_content
    from dcp_format.converters import Converter, converter_for, detect
    from dcp_format.export.safetensors_writer import SafetensorsWriter
    from dcp_format.export.save_safetensors import save_safetensors
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
    "Conversion",
    "Converter",
    "DynamicMetaLoadPlanner",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "QuantizedHuggingFaceStorageReader",
    "SafetensorsWriter",
    "TensorEntry",
    "WriteOptions",
    "consolidate_safetensors_files",
    "consolidate_safetensors_files_on_every_rank",
    "convert",
    "converter_for",
    "dcp_to_torch_save",
    "detect",
    "open_content",
    "save_safetensors",
    "torch_save_to_dcp",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_format.content.content": ("Content", "TensorEntry"),
        "dcp_format.conversion": ("Conversion", "convert", "open_content"),
        "dcp_format.content.write_options": ("WriteOptions",),
        "dcp_format.converters": ("Converter", "converter_for", "detect"),
        "dcp_format.export.safetensors_writer": ("SafetensorsWriter",),
        "dcp_format.export.save_safetensors": ("save_safetensors",),
        "dcp_format.hugging_face.consolidate": (
            "consolidate_safetensors_files",
            "consolidate_safetensors_files_on_every_rank",
        ),
        "dcp_format.hugging_face.hf_reader": ("HuggingFaceStorageReader",),
        "dcp_format.hugging_face.hf_writer": ("HuggingFaceStorageWriter",),
        "dcp_format.hugging_face.quantized_reader": ("QuantizedHuggingFaceStorageReader",),
        "dcp_format.torch_save.broadcasting_reader": ("BroadcastingTorchSaveReader",),
        "dcp_format.torch_save.dynamic_planner": ("DynamicMetaLoadPlanner",),
        "dcp_format.torch_save.stock_calls": ("dcp_to_torch_save", "torch_save_to_dcp"),
    },
)
