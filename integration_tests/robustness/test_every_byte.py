"""Each byte of a small checkpoint is damaged in turn: a load refuses it or does not depend on it, verification sees it.

Which of the two is known beforehand: bytes of values, the manifest and the footer are refused; what frames values for
`torch.load`, gaps, and the pickle for stock are not looked at. The state is as small as a sharded one can be.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dcp_all as dcp
from dcp_core.errors import CorruptCheckpointError
from dcp_io import LocalStore, verify_checkpoint
from integration_tests.robustness.damage import METADATA, data_files, files, flipped, head_bytes, payload_bytes

# (layout, index for stock, masks that are tried on each byte)
CASES = [
    pytest.param("torch", True, "one", marks=pytest.mark.slow),
    pytest.param("raw", False, "one", marks=pytest.mark.slow),
    pytest.param("torch", False, "each", marks=pytest.mark.slow),
    pytest.param("raw", True, "each", marks=pytest.mark.slow),
]


def save_tiny(folder: str, layout: str, interop: bool) -> None:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    local = torch.full((1, 2), float(dist.get_rank() + 1))
    weight = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    writer = dcp.FileSystemWriter(folder, layout=layout, interop=interop)
    dcp.save({"weight": weight, "step": 7}, storage_writer=writer)


def load(folder: Path) -> CorruptCheckpointError | None:
    """None if what was loaded is right, else the refusal."""
    template: dict[str, Any] = {"weight": torch.zeros(2, 2), "step": None}
    try:
        dcp.load(template, storage_reader=dcp.FileSystemReader(folder, thread_count=1), no_dist=True)
    except CorruptCheckpointError as error:
        return error
    assert template["weight"].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert template["step"] == 7
    return None


def masks(mode: str, position: int) -> list[int]:
    return [1 << position % 8] if mode == "one" else [*(1 << bit for bit in range(8)), 0xFF]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "interop", "mode"), CASES)
def test_every_byte(ranks: Any, tmp_path: Path, layout: str, interop: bool, mode: str, record_property: Any) -> None:
    folder = tmp_path / "tiny"
    ranks.run(2, save_tiny, str(folder), layout, interop)
    assert len(data_files(folder)) == 2
    assert load(folder) is None
    store = LocalStore(folder)
    assert verify_checkpoint(store).ok
    payload, head = payload_bytes(folder), head_bytes(folder)
    flips = refused = 0
    for path in files(folder):
        for position in range(path.stat().st_size):
            key, start = payload.get((path.name, position), (None, None))
            depends = key is not None or (path.name == METADATA and position >= head)
            for mask in masks(mode, position):
                with flipped(path, position, mask):
                    where = f"bits {mask:#x} of byte {position} of {path.name}"
                    error = load(folder)
                    assert (error is not None) == depends, f"{where}: {error}"
                    if error is not None:
                        assert error.file == path.name, where
                        assert (error.key, error.offset) == (key, start) or path.name == METADATA, where
                    problems = verify_checkpoint(store).problems
                    assert any(problem.file == path.name for problem in problems), f"{where} is not reported"
                flips += 1
                refused += error is not None
    assert flips == sum(path.stat().st_size for path in files(folder)) * len(masks(mode, 0))
    assert 0 < refused < flips
    record_property("flips", flips)
    record_property("refused", refused)
    assert verify_checkpoint(store).ok
    assert load(folder) is None


@pytest.mark.slow
def test_a_byte_more_or_less(ranks: Any, tmp_path: Path) -> None:
    """Each length that a file can be cut to, and bytes behind its end."""
    original = tmp_path / "original"
    for layout in ("torch", "raw"):
        shutil.rmtree(original, ignore_errors=True)
        ranks.run(2, save_tiny, str(original), layout, False)
        folder = Path(shutil.copytree(original, tmp_path / layout))
        payload = payload_bytes(original)
        for path in files(folder):
            data = path.read_bytes()
            for length in [*range(len(data)), len(data) + 1, len(data) + 100]:
                path.write_bytes(data[:length] + bytes(max(0, length - len(data))))
                lost = [n for name, n in payload if name == path.name and n >= length]
                error = load(folder)
                assert (error is not None) == bool(lost or path.name == METADATA), (path.name, length, error)
                assert error is None or error.file == path.name
                assert any(problem.file == path.name for problem in verify_checkpoint(LocalStore(folder)).problems)
            path.write_bytes(data)
        assert load(folder) is None
