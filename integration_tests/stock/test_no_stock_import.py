"""Saving and loading never imports stock: a checkpoint of DTensors in processes where nothing else would import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from integration_tests.launcher import launcher_store

SCRIPT = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

def stock():
    return sorted(name for name in sys.modules if name.startswith("torch.distributed.checkpoint"))

folder, rank, port = sys.argv[1], *map(int, sys.argv[2:4])
assert stock() == [], "torch imports it by itself; then nothing can be said here"
store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=240))
import dcp_all as dcp, dcp_core.testing, dcp_fs.plugin
assert stock() == [], "importing dcp_all imports it"
full = torch.arange(24.0).reshape(6, 4)

def make(value, mesh):
    return {
        "rows": distribute_tensor(full * value, mesh, [Shard(0)]),
        "columns": distribute_tensor(full * value, mesh, [Shard(1)]),
        "all": distribute_tensor(full * value, mesh, [Replicate()]),
        "nested": {"plain": full * value, "step": 7 if value else 0, "list": [torch.ones(2) * value, {"k": "v"}]},
    }

def run(layout, collectives, mesh):
    where = f"{folder}/{mesh.size()}-{layout}-{collectives}"
    writer = dcp.FileSystemWriter(where, layout=layout)
    dcp.save(make(1, mesh), storage_writer=writer, use_collectives=collectives)
    loaded, wanted = make(0, mesh), make(1, mesh)
    report = dcp.load(loaded, checkpoint_id=where)
    assert len(report.loaded) == 7, report
    for key in ("rows", "columns", "all"):
        assert torch.equal(loaded[key].to_local(), wanted[key].to_local()), key
    assert loaded["nested"]["step"] == 7
    everything = dcp.load_keys(checkpoint_id=where)
    assert torch.equal(everything["rows"], full)

for world in range(rank + 1, 3):  # the first rank alone, then both
    own = dist.PrefixStore(str(world), store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    for layout in ("torch", "raw"):
        for collectives in (True, False):
            run(layout, collectives, mesh)
    dcp.plugins.list()
    dcp.find_checkpoints(folder)
    dist.destroy_process_group()
assert stock() == [], stock()
print("done")
"""


def test_dtensors_are_saved_and_loaded_without_stock(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    store = launcher_store()
    command: list[Any] = [sys.executable, "-W", "ignore", script, tmp_path / "checkpoints"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=250)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert all(output.rstrip().endswith("done") for output in outputs)
