"""Makes the golden checkpoints of transforms: `python -m integration_tests.golden.make_transforms [folder]`.

One for each version of each descriptor. What a compressor writes may change with its library: these files are read for
ever, and not compared with what is written today.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch

import dcp_all as dcp

__all__ = ["FOLDER", "SETTINGS", "state"]

FOLDER = Path(__file__).parent / "transforms"
SETTINGS = {"stream.zstd-1": "zstd", "block.zstd-1": "block.zstd/1", "block.planes-1": "planes"}


def state() -> dict[str, torch.Tensor]:
    """Values that shrink, of every width and of each kind of number; one is cut into blocks."""
    maker = torch.Generator().manual_seed(5)
    weight = (torch.randn(9000, generator=maker) * 0.02).bfloat16()
    return {
        "bf16": weight.repeat(16).reshape(12, 12_000),
        "fp32": torch.randn(3000, generator=maker) * 0.02,
        "positive": (torch.randn(3000, generator=maker) * 0.02).square(),
        "fp64": torch.arange(600, dtype=torch.float64) / 8,
        "complex": torch.complex(torch.arange(700.0) / 16, torch.zeros(700)),
        "int64": torch.arange(1000) * 3 - 500,
        "int16": torch.arange(3000, dtype=torch.int16),
        "mask": torch.arange(9000) % 7 == 0,
    }


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements, row-major."""
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    warnings.simplefilter("ignore")
    for name, setting in SETTINGS.items():
        writer = dcp.FileSystemWriter(folder / name, compression=setting, layout="raw", thread_count=1)
        dcp.save(state(), storage_writer=writer)
    expected = {key: [str(each.dtype), list(each.shape), digest(each)] for key, each in state().items()}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
