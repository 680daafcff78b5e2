"""`torch.distributed.checkpoint`. Options: `thread_count` for saving."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from integration_tests.benchmarks.workers.contract import Options
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]

dcp: Any = importlib.import_module("torch.distributed.checkpoint")  # its names are not exported for type checkers


def version() -> str:
    return torch.__version__


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=fsync, **options)
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def load(state: dict[str, Any], folder: Path, *, options: Options) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=not dist.is_initialized())
