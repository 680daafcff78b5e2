"""Makes a golden checkpoint with PyTorch's own checkpointing, of whatever torch runs this: two ranks, one DTensor.

    python integration_tests/golden/make_stock.py integration_tests/golden/stock/torch-2.13.0

Needs nothing but torch. What it writes differs from run to run (ids, absolute paths): it is made once and kept.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def plain_values() -> dict[str, Any]:
    """What every rank saves the same."""
    return {
        "model": {"bias": torch.arange(5, dtype=torch.bfloat16), "scale": torch.tensor(2.5, dtype=torch.float64)},
        "mask": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 3, dtype=torch.int16),
        "list": [torch.arange(3), {"deep": torch.ones(2, dtype=torch.float16)}],
        "grad": torch.ones(2, requires_grad=True),
        "epoch": 7,
        "note": {"lr": 0.5, "tags": ["a", "ß"]},
    }


def weight() -> torch.Tensor:
    """The tensor that is sharded by rows."""
    return torch.arange(15, dtype=torch.float32).reshape(5, 3)


def save(rank: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:
        from torch.distributed._tensor import Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    state = plain_values()
    state["model"]["weight"] = distribute_tensor(weight(), init_device_mesh("cpu", (2,)), [Shard(0)])
    dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(save, (sys.argv[1],), nprocs=2)
