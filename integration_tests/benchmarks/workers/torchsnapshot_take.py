"""torchsnapshot. It does not fsync: its files are flushed afterwards, within the time."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from torchsnapshot import Snapshot, StateDict

from integration_tests.benchmarks.workers.contract import Options, sync_folder
from integration_tests.benchmarks.workers.torch_state import as_bytes, make

__all__ = ["as_bytes", "load", "make", "save", "version"]


def version() -> str:
    return importlib.metadata.version("torchsnapshot")


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    Snapshot.take(str(folder), {"state": StateDict(**state)})
    if fsync:
        sync_folder(folder)


def load(state: dict[str, Any], folder: Path, *, options: Options) -> dict[str, Any]:
    target = StateDict(**state)
    Snapshot(str(folder)).restore({"state": target})
    return dict(target)
