"""Exports of which one rank is stopped in the middle: nobody gives up, and the files are whole."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import dcp_all as dcp


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_is_stopped_while_it_writes(ranks: Any, tmp_path: Path, dim: int, seconds: float) -> None:
    def run(folder: str, dim: int, seconds: float) -> bool:
        import subprocess
        import sys

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        from dcp_format.export import box_writes, gathering

        mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
        local = torch.arange(512.0 * 512).view(512, 512).chunk(2, dim)[rank].contiguous()
        stopped = threading.Event()

        def stopping(*arguments: Any) -> Any:
            if rank == 1 and not stopped.is_set():
                stopped.set()
                wake = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
                with subprocess.Popen([sys.executable, "-c", wake]):
                    os.kill(os.getpid(), signal.SIGSTOP)
            return kept(*arguments)

        where: Any
        where, name = (box_writes, "_write_piece") if dim == 0 else (gathering.Gathering, "_send")
        kept = getattr(where, name)
        setattr(where, name, stopping)
        try:
            dcp.save_safetensors({"w": DTensor.from_local(local, mesh, [Shard(dim)])}, folder)
        finally:
            setattr(where, name, kept)
        return stopped.is_set()

    assert ranks.run(2, run, str(tmp_path), dim, seconds) == [False, True]
    assert torch.equal(load_file(tmp_path / "model.safetensors")["w"], torch.arange(512.0 * 512).view(512, 512))
