"""Sharded saves and loads by accelerate's and Lightning's own code, unedited, on two ranks with FSDP2.

In one process each: what our save wrote is loaded by ours, and by PyTorch's own once it means itself again.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 280

COMMON = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from torch.distributed.fsdp import fully_shard
import dcp_fs
from dcp_bridge import original_stock, replace_stock

folder = sys.argv[1]

def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

def train(model, optimizer, steps=2):
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

def local(value):
    return value.to_local() if hasattr(value, "to_local") else value

def bits(model, optimizer):
    parameters = [local(each).detach().clone() for each in model.parameters()]
    optimizer = getattr(optimizer, "optimizer", optimizer)
    states = [local(value).clone() for each in optimizer.state.values() for value in each.values()]
    return parameters + states, [group["lr"] for group in optimizer.param_groups]

def is_same(one, other):
    return one[1] == other[1] and len(one[0]) == len(other[0]) and all(map(torch.equal, one[0], other[0]))

def is_ours(path):
    return dcp_fs.FileSystemReader(path).read_metadata().storage_meta.modules == ["dcp-manifest/1"]
"""

ACCELERATE = """
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

accelerator = Accelerator(cpu=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

def prepared(seed, lr):
    model = fully_shard(build(seed))
    return model, accelerator.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=lr), device_placement=False)

def load(seed):
    model, optimizer = prepared(seed, lr=1.0)
    load_fsdp_model(plugin, accelerator, model, folder)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return model, optimizer

model, optimizer = prepared(0, lr=0.01)
train(model, optimizer)
with replace_stock() as made:
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    by_ours = load(1)
    assert is_ours(folder + "/pytorch_model_fsdp_0") and is_ours(folder + "/optimizer_0")
by_stock = load(2)
accelerator.wait_for_everyone()
"""

LIGHTNING = """
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from pathlib import Path

strategy = ModelParallelStrategy(lambda model, mesh: fully_shard(model, mesh=mesh["data_parallel"]))
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()

def prepared(seed, lr):
    model = fabric.setup_module(build(seed))
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr))

def load(seed):
    model, optimizer = prepared(seed, lr=1.0)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(folder + "/sharded", state)
    assert state["step"] == 7
    return model, optimizer

model, optimizer = prepared(0, lr=0.01)
train(model, optimizer)
with replace_stock() as made:
    fabric.save(folder + "/sharded", {"model": model, "optimizer": optimizer, "step": 7})
    by_ours = load(1)
    assert is_ours(folder + "/sharded")
    whole = _load_distributed_checkpoint(Path(folder) / "sharded")
    assert torch.equal(whole["model"]["0.weight"], model.state_dict()["0.weight"].full_tensor())
by_stock = load(2)
fabric.barrier()
"""

COMPARED = """
import torch.distributed.checkpoint
assert made.replaced and not made.active
assert torch.distributed.checkpoint is original_stock()
expected = bits(model, optimizer)
assert len(expected[0]) == 16
assert is_same(bits(*by_ours), expected), "loaded by ours"
assert is_same(bits(*by_stock), expected), "loaded by stock"
train(model, optimizer, steps=1)
assert not is_same(bits(*by_ours), bits(model, optimizer))
train(*by_ours, steps=1)
assert is_same(bits(*by_ours), bits(model, optimizer)), "one step later"
print("bit-equal")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("accelerate", ACCELERATE), ("lightning", LIGHTNING)])
def test_sharded_saves_are_bit_equal(package: str, code: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: `nox -s frameworks` installs it")
    (tmp_path / "script.py").write_text(COMMON + code + COMPARED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "script.py", str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit-equal") == 2
