"""Orbax with numpy arrays (bfloat16 by ml_dtypes).

It always flushes its data to the disk, compresses, and loads into new arrays.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from integration_tests.benchmarks.workers.contents import TensorSpec, fill
from integration_tests.benchmarks.workers.contract import Options, sync_folder

__all__ = ["as_bytes", "load", "make", "save", "version"]


def version() -> str:
    return importlib.metadata.version("orbax-checkpoint")


def as_bytes(value: Any) -> Any:
    return np.asarray(value).reshape(-1).view(np.uint8)


def make(specs: Sequence[TensorSpec], *, seed: int) -> dict[str, Any]:
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int64": np.int64}
    state = {spec.name: np.empty(spec.shape, kinds[spec.dtype]) for spec in specs}
    fill(((spec, as_bytes(state[spec.name])) for spec in specs), seed=seed)
    return state


def save(state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
    ocp.PyTreeCheckpointer().save(folder, state)
    if fsync:
        sync_folder(folder)  # its commit marker


def load(state: dict[str, Any], folder: Path, *, options: Options) -> dict[str, Any]:
    arguments = ocp.checkpoint_utils.construct_restore_args(state)
    loaded: dict[str, Any] = ocp.PyTreeCheckpointer().restore(folder, restore_args=arguments)
    return loaded
