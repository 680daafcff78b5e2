"""Training on several processes with Lightning's own launcher: resume on other world sizes, shards, kills.

`TRAIN` is run as a script: Lightning starts it once more for each further rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp_io

if importlib.util.find_spec("lightning") is None:
    pytest.skip("needs Lightning: `nox -s frameworks` installs it", allow_module_level=True)

TRAIN = """
import json, os, signal, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from dcp_lightning import DcpCheckpointIO
from dcp_lightning.strategies import DcpDDPStrategy, DcpFSDPStrategy, DcpModelParallelStrategy

asked = json.loads(sys.argv[1])
ranks = asked["ranks"]


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        self.losses = []

    def configure_model(self):
        if asked["strategy"] == "model parallel":
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        whole = loss.detach().clone()  # of all ranks: the same samples whatever the world size
        dist.all_reduce(whole)
        self.losses.append((self.trainer.global_step, whole.item() / ranks))
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Killer(ModelCheckpoint):
    def setup(self, trainer, *args, **kwargs):
        super().setup(trainer, *args, **kwargs)
        replace = os.replace

        def killed(source, target):
            if str(target).endswith(".metadata") and trainer.global_step == asked["killed_at"]:
                os.kill(os.getpid(), signal.SIGKILL)  # all data is there, the index is not
            replace(source, target)

        os.replace = killed


plugin = DcpCheckpointIO(background=asked.get("background"))
strategy = {
    "model parallel": lambda: DcpModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    "fsdp": lambda: DcpFSDPStrategy(auto_wrap_policy={torch.nn.Linear}),
    "ddp": DcpDDPStrategy,
    "lightning's ddp": lambda: "ddp",
}[asked["strategy"]]()
folder = asked["folder"]
saving = (Killer if "killed_at" in asked else ModelCheckpoint)(folder, every_n_train_steps=2, save_last=True)
trainer = Trainer(
    max_steps=asked["steps"], accelerator="cpu", devices=ranks, strategy=strategy, plugins=[plugin], callbacks=[saving],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)
samples = torch.linspace(-1, 1, 96 * 8).reshape(96, 8).sin()
model = Model()
trainer.fit(model, DataLoader(TensorDataset(samples), batch_size=8 // ranks), ckpt_path=asked.get("resumed_from"))
if "tested" in asked:
    model.test_step = lambda batch, batch_idx: None
    trainer.test(model, DataLoader(TensorDataset(samples), batch_size=8), ckpt_path=asked["tested"], verbose=False)

from dcp_state import get_state_dict

weights, moments = get_state_dict(model, trainer.optimizers)
whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in weights.values()]
if trainer.is_global_zero:
    found = {
        "losses": model.losses,
        "weights": [value.tolist() for value in whole],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "loops": repr(trainer.fit_loop.state_dict()),
    }
    Path(asked["result"]).write_text(json.dumps(found))
"""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {"OMP_NUM_THREADS": "1"}


def launch(folder: Path, script: str = TRAIN, **asked: Any) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks, in a session of its own, and end what is left of it."""
    file = folder / "train.py"
    file.write_text(script)
    started = subprocess.Popen(
        [
            sys.executable,
            str(file),
            json.dumps({"folder": str(folder / "run"), "result": str(folder / "result"), **asked}),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess([], started.returncode, output)


def train(folder: Path, script: str = TRAIN, **asked: Any) -> dict[str, Any]:
    """Run a script that has to succeed, and return what it found."""
    (folder / "result").unlink(missing_ok=True)
    done = launch(folder, script, **asked)
    assert done.returncode == 0, done.stdout
    found: dict[str, Any] = json.loads((folder / "result").read_text())
    return found


def last(folder: Path) -> str:
    return str(folder / "run" / "last.ckpt")


@pytest.mark.parametrize("strategy", ["model parallel", "fsdp", "ddp", "lightning's ddp"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", strategy=strategy, ranks=2, steps=8)
    train(tmp_path, strategy=strategy, ranks=2, steps=4, background="process")
    resumed = train(tmp_path, strategy=strategy, ranks=2, steps=8, resumed_from="last")
    assert resumed.pop("losses") == whole.pop("losses")[4:]
    assert resumed == whole
    assert resumed["step"] == 8


def test_shards_go_from_two_ranks_to_four_to_one(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", strategy="model parallel", ranks=1, steps=6)
    parts = [
        train(tmp_path, strategy="model parallel", ranks=2, steps=2),
        train(tmp_path, strategy="model parallel", ranks=4, steps=4, resumed_from=last(tmp_path), background="thread"),
    ]
    files = sorted(path.name.split("_")[2] for path in (tmp_path / "run" / "last.ckpt").glob("*.distcp"))
    assert len(files) == 4, files
    parts.append(
        train(tmp_path, strategy="model parallel", ranks=1, steps=6, resumed_from=last(tmp_path), tested="best")
    )
    found = [loss for part in parts for loss in part["losses"]]
    assert [step for step, _ in found] == [step for step, _ in whole["losses"]] == [*range(6)]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in whole["losses"]], rel=1e-5)
    assert parts[-1]["lr"] == whole["lr"]


def test_a_strategy_resumes_what_another_has_saved(tmp_path: Path) -> None:
    train(tmp_path, strategy="ddp", ranks=2, steps=4)
    whole = train(
        tmp_path, strategy="ddp", ranks=2, steps=8, resumed_from=last(tmp_path), folder=str(tmp_path / "more")
    )
    resumed = train(tmp_path, strategy="model parallel", ranks=2, steps=8, resumed_from=last(tmp_path))
    assert [loss for _, loss in resumed["losses"]] == pytest.approx([loss for _, loss in whole["losses"]], rel=1e-5)


@pytest.mark.parametrize("strategy", ["model parallel", "lightning's ddp"])
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(strategy: str, tmp_path: Path) -> None:
    killed = launch(tmp_path, strategy=strategy, ranks=2, steps=8, killed_at=6)
    assert killed.returncode != 0
    assert not (tmp_path / "result").exists()
    found = dcp_io.latest_valid(tmp_path / "run")
    assert found is not None
    assert not dcp_io.verify_checkpoint(dcp_io.open_store(last(tmp_path))).problems
    resumed = train(tmp_path, strategy=strategy, ranks=2, steps=8, resumed_from="last")
    assert [step for step, _ in resumed["losses"]] == [4, 5, 6, 7]


FABRIC = """
import json, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from lightning.fabric import Fabric
from torch.distributed.fsdp import fully_shard

from dcp_lightning import DcpCheckpointIO
from dcp_lightning.fabric import DcpDDPStrategy, DcpModelParallelStrategy

asked = json.loads(sys.argv[1])
ranks = asked["ranks"]
strategy = {
    "model parallel": lambda: DcpModelParallelStrategy(
        lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]), ranks, 1
    ),
    "ddp": DcpDDPStrategy,
    "lightning's ddp": lambda: "ddp",
}[asked["strategy"]]()
plugin = DcpCheckpointIO(background=asked.get("background"))
fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[plugin])
fabric.launch()
torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
if asked["strategy"] == "model parallel":
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
else:
    model, optimizer = fabric.setup(model, optimizer)
state = {"model": model, "optimizer": optimizer, "step": 0}
left = fabric.load(asked["resumed_from"], state) if "resumed_from" in asked else {}
if "resumed_from" in asked:
    try:
        fabric.load(asked["resumed_from"], {**state, "absent": 0})
    except KeyError as error:
        assert "absent" in str(error), error
    else:
        raise AssertionError("an entry that the checkpoint lacks is an error")
losses = []
samples = torch.linspace(-1, 1, 64).reshape(8, 8).sin().chunk(ranks)[fabric.global_rank]
while state["step"] < asked["steps"]:
    loss = model(samples).square().mean()
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append((state["step"], fabric.all_reduce(loss.detach()).item()))
    state["step"] += 1
fabric.save(asked["folder"], {**state, "note": "of rank 0"})
plugin.teardown()
if fabric.is_global_zero:
    Path(asked["result"]).write_text(json.dumps({"losses": losses, "left": left}))
"""


@pytest.mark.parametrize("strategy", ["model parallel", "ddp", "lightning's ddp"])
def test_fabric_goes_from_two_ranks_to_four_to_one(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = train(tmp_path / "whole", FABRIC, strategy=strategy, ranks=1, steps=6)["losses"]
    path, found = str(tmp_path / "run"), []
    for ranks, steps, background in ((2, 2, None), (4, 4, "thread"), (1, 6, "process")):
        resumed = {"resumed_from": path} if found else {}
        part = train(tmp_path, FABRIC, strategy=strategy, ranks=ranks, steps=steps, background=background, **resumed)
        assert part["left"] == ({"note": "of rank 0"} if resumed else {})
        found += part["losses"]
    assert [step for step, _ in found] == [*range(6)]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in whole], rel=1e-5)
