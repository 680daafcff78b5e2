"""torch_checkpointing, saving synchronously, as default options for loading have it (mapped files).

Its default `use_direct_io=True` fails on ext4. It does not fsync: its files are flushed afterwards, within the time.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch_checkpointing
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from integration_tests.benchmarks.workers.contract import Options, sync_folder
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]


def version() -> str:
    return str(torch_checkpointing.__version__)


@functools.cache
def _manager() -> Any:
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage).build()


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    _manager().save(str(folder), {"state": state})
    if fsync:
        sync_folder(folder)


def load(state: dict[str, Any], folder: Path, *, options: Options) -> dict[str, Any]:
    loaded: dict[str, Any] = _manager().load(str(folder), into={"state": state})["state"]
    return loaded
