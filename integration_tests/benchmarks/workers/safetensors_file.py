"""`safetensors.torch`: one file. It does not fsync: the file and its folder are flushed afterwards, within the time.

Options for loading: `in_place`: copy into the existing tensors, as `load_model` does; else new tensors, as `load_file`
leaves them: views of a mapped file, most of which has not been read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from integration_tests.benchmarks.workers.contract import Options, sync_folder
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]


def version() -> str:
    return safetensors.__version__


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    if fsync:
        sync_folder(folder)


def load(state: dict[str, Any], folder: Path, *, options: Options) -> dict[str, Any] | None:
    loaded = load_file(folder / "model.safetensors")
    if not options.get("in_place", True):
        return loaded
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(loaded[name])
    return None
