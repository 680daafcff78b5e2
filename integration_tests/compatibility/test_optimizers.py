"""Optimizers of other libraries: accelerate's and Lightning's wrappers, Lion, and what else happens to be installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COMMON = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import dcp_all as dcp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = torch.nn.Linear(4, 2), torch.nn.Linear(3, 3)

    def forward(self, data):
        return self.layer(data).square().sum()

def steps(net, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        net(torch.ones(3, 4)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]

def check(make, count):
    # make(seed) gives a model, its optimizer and the one that really steps
    runs = [make(seed) for seed in (0, 0, 1)]
    untouched, looked_at, resumed = runs
    for net, optimizer, _ in (untouched, looked_at):
        steps(net, optimizer, count)
    net, optimizer, real = looked_at
    before = [(id(group), [*map(id, group["params"])]) for group in real.param_groups], [*map(id, real.state)]
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    where = f"{sys.argv[1]}/{type(optimizer).__name__}-{count}"
    dcp.save({"app": dcp.app_state(net, optimizer)}, checkpoint_id=where, no_dist=True)
    after = [(id(group), [*map(id, group["params"])]) for group in real.param_groups], [*map(id, real.state)]
    assert before == after
    assert all(map(torch.equal, weights, net.parameters()))
    dcp.load({"app": dcp.app_state(*resumed[:2])}, checkpoint_id=where, no_dist=True)
    wanted = steps(*untouched[:2], 3)
    assert not torch.equal(wanted[0], weights[0])
    for run in (looked_at, resumed):
        assert all(map(torch.equal, wanted, steps(*run[:2], 3)))
"""

ACCELERATE = """
from accelerate import Accelerator

def make(seed):
    torch.manual_seed(seed)
    net = Net()
    groups = [{"params": net.layer.parameters()}, {"params": net.unused.parameters(), "lr": 0.2}]
    net, optimizer = Accelerator(cpu=True).prepare(net, torch.optim.AdamW(groups, lr=0.1))
    return net, optimizer, optimizer.optimizer

for count in (0, 2):
    check(make, count)
"""

LIGHTNING = """
from lightning.fabric import Fabric
from lightning.pytorch.core.optimizer import LightningOptimizer

class Strategy:
    def optimizer_step(self, optimizer, closure, **kwargs):
        return optimizer.step(closure)

def of_trainer(seed):
    torch.manual_seed(seed)
    net = Net()
    real = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer = LightningOptimizer(real)
    optimizer._strategy = Strategy()
    return net, optimizer, real

def of_fabric(seed):
    torch.manual_seed(seed)
    net = Net()
    real = torch.optim.AdamW(net.parameters(), lr=0.1)
    _, optimizer = Fabric(accelerator="cpu", devices=1).setup(net, real)
    return net, optimizer, real


for make in (of_trainer, of_fabric):
    for count in (0, 2):
        check(make, count)
"""

PLAIN = """
import importlib

names = {
    "lion_pytorch": ["Lion"],
    "schedulefree": ["AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree"],
    "pytorch_optimizer": ["Adan", "CAME", "DAdaptSGD", "Prodigy", "RACS", "SOAP", "ScheduleFreeAdamW"],
    "prodigyopt": ["Prodigy"],
    "timm.optim": ["AdamP", "Adan", "Lamb", "NvNovoGrad", "Kron"],
}
package = "{package}"
for name in names[package]:
    kind = getattr(importlib.import_module(package), name)

    def make(seed):
        torch.manual_seed(seed)
        net = Net()
        optimizer = kind(net.parameters(), lr=0.1)
        getattr(optimizer, "train", lambda: None)()
        return net, optimizer, optimizer

    for count in (0, 2):
        check(make, count)
"""

CASES = {
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    **{
        package: PLAIN.replace("{package}", package)
        for package in ("lion_pytorch", "schedulefree", "pytorch_optimizer", "prodigyopt", "timm.optim")
    },
}
INSTALLED = ("accelerate", "lightning", "lion_pytorch")
"""Modules that `nox -s frameworks` installs."""


@pytest.mark.slow
@pytest.mark.parametrize("package", CASES)
def test_looked_at_and_resumed(package: str, tmp_path: Path) -> None:
    module = package.partition(".")[0]
    pytest.importorskip(module, reason=f"needs {module}{'' if module in INSTALLED else ', which no session installs'}")
    command = [sys.executable, "-c", COMMON + CASES[package], str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
