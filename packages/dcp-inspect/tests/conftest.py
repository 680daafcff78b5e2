"""Checkpoints made of bytes, damage to them, and the command with what it prints; torch is not needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcp_inspect.cli import run
from dcp_io import LocalStore, Payload, StoreBackend, WriteRequest
from dcp_manifest import CheckpointIndex
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, ManifestInfo

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]
DataFile = Callable[[Path], Path]


@pytest.fixture
def write() -> Write:
    """Write a checkpoint."""
    return _write


def _write(path: Path, *, rows: int = 4000, layout: Any = "torch") -> Path:
    """Write a checkpoint of two ranks' halves of a matrix, a scalar, another name of the matrix, and an object."""
    data = np.random.default_rng(0).standard_normal((rows, 16)).astype(np.float32)
    half = rows // 2
    parts = [("model.weight", data[:half]), ("model.weight", data[half:]), ("step", np.array(7, np.int64))]
    requests = []
    for name, part in parts:
        payload = Payload(part.tobytes(), Framing.RAW, str(part.dtype), part.shape)
        requests.append(WriteRequest(name, part.nbytes, lambda payload=payload: payload))
    requests.append(WriteRequest("note", 0, lambda: Payload(b"no archive", Framing.OBJECT)))
    backend = StoreBackend(LocalStore(path), layout=layout)
    save_id = backend.begin_save(overwrite=True)
    stored = backend.write(requests, prefix="__0_", save_id=save_id)
    index = CheckpointIndex(
        dtypes=("float32", "int64"),
        files=stored.files,
        tensor_names=["model.weight", "step"],
        tensor_dtype=np.array([0, 1], np.uint8),
        tensor_flags=np.zeros(2, np.uint8),
        tensor_ndim=np.array([2, 0], np.uint8),
        tensor_owner=np.zeros(2, np.uint32),
        tensor_shape=np.array([rows, 16]),
        tensor_chunks=np.array([2, 1]),
        chunk_offsets=np.array([0, 0, half, 0]),
        chunk_sizes=np.array([half, 16, half, 16]),
        chunk_items=stored.take(np.arange(3)).columns,
        object_names=["note"],
        object_owner=np.zeros(1, np.uint32),
        object_items=stored.take(np.arange(3, 4)).columns,
        alias_names=["model.tied"],
        alias_targets=np.zeros(1, np.uint32),
        info=ManifestInfo(save_id, 2, "test/1"),
    )
    backend.publish(".metadata", encode(index))
    backend.finish_save(index.files)
    return path


@pytest.fixture
def dcp(capsys: pytest.CaptureFixture[str]) -> Dcp:
    """Run the command; returns its exit code, output and error output."""

    def dcp(*arguments: object) -> tuple[int, str, str]:
        code = run([str(each) for each in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return dcp


@pytest.fixture
def data_file() -> DataFile:
    """Return the only data file of a checkpoint."""

    def data_file(path: Path) -> Path:
        (found,) = path.glob("*.distcp")
        return found

    return data_file
