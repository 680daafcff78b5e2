"""Hugging Face safetensors of torchtitan's models: loaded onto any sharding, and exported from it.

The model's state dict adapter converts names and shapes; `dcp_format` reads and writes the files.
"""

from __future__ import annotations

import os
from typing import Any

from dcp_core import load, save
from dcp_format import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    QuantizedHuggingFaceStorageReader,
    consolidate_safetensors_files_on_every_rank,
)

__all__ = ["export_model", "load_model"]

_PARTS = "sharded"
_THREADS = 4


def load_model(adapter: Any, model_state: dict[str, Any], path: str, *, quantized: bool) -> dict[str, Any]:
    """Return a model's state dict, loaded from safetensors.

    Args:
        adapter: State dict adapter of the model.
        model_state: State dict of the model, used as the template; its tensors may be filled in place.
        path: Folder of safetensors in Hugging Face's format.
        quantized: Whether to dequantize tensors that are stored in blocks with scales.

    Raises:
        CheckpointException, LoadMismatchError, …: See `dcp_core.load`.

    Ranks: every rank; collective.
    """
    tensors = adapter.to_hf(model_state)
    load(tensors, storage_reader=_reader(adapter, path, quantized=quantized))
    loaded: dict[str, Any] = adapter.from_hf(tensors)
    return loaded


def export_model(adapter: Any, model_state: dict[str, Any], folder: str) -> None:
    """Export a model's state as safetensors: into the files that the model's index names, or into one without an index.

    Ranks write their parts into the folder `sharded`, and then join the parts into whole files.

    Raises:
        CheckpointException, OSError, …: See `dcp_core.save`.

    Ranks: every rank; collective.
    """
    tensors = adapter.to_hf(model_state)
    files = adapter.fqn_to_index_mapping
    if not files:
        save(tensors, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True))
        return
    parts = os.path.join(folder, _PARTS)
    save(tensors, storage_writer=HuggingFaceStorageWriter(parts, fqn_to_index_mapping=files, save_distributed=True))
    consolidate_safetensors_files_on_every_rank(parts, folder, files, num_threads=_THREADS)


def _reader(adapter: Any, path: str, *, quantized: bool) -> HuggingFaceStorageReader:
    """Return a reader; for quantized models, with the options of the adapter's own reader, which some adapters lack."""
    theirs: Any = adapter.get_hf_storage_reader(path, True) if quantized else None
    if not hasattr(theirs, "block_size"):
        return HuggingFaceStorageReader(path, thread_count=_THREADS)
    return QuantizedHuggingFaceStorageReader(
        path, thread_count=_THREADS, target_dtype=theirs.target_dtype, block_size=theirs.block_size
    )
