"""This library. Options: `layout`, `interop` for saving, `verify` for loading."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dcp_all as dcp
from integration_tests.benchmarks.workers.contract import Options
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]


def version() -> str:
    return importlib.metadata.version("dcp-all")


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=fsync, **options)
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized())


def load(state: dict[str, Any], folder: Path, *, options: Options) -> None:
    reader = dcp.FileSystemReader(folder, **options)
    dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
