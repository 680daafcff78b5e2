"""Lightning's and accelerate's own functions, unedited, in processes where `torch.distributed.checkpoint` is replaced.

`replace_stock` lets it mean `dcp_all` there.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

REPLACED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed.checkpoint
import dcp_all
from dcp_bridge import replace_stock
replace_stock()
folder = sys.argv[1]
"""

LIGHTNING = """
from pathlib import Path
from lightning.fabric.strategies.fsdp import _distributed_checkpoint_load, _distributed_checkpoint_save
model = torch.nn.Linear(4, 2)
_distributed_checkpoint_save({"model": model.state_dict(), "step": 3}, Path(folder) / "a")
state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}, "step": 0}
_distributed_checkpoint_load(state, Path(folder) / "a")
assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())
assert dcp_all.FileSystemReader(Path(folder) / "a").read_metadata().storage_meta.modules == ["dcp-manifest/1"]
"""

ACCELERATE = """
from accelerate.utils.fsdp_utils import _distributed_checkpoint_to_merged_weights
import safetensors.torch
model = torch.nn.Linear(4, 2)
torch.distributed.checkpoint.save(
    {"model": model.state_dict()},
    storage_writer=torch.distributed.checkpoint.FileSystemWriter(folder + "/pytorch_model_fsdp_0"),
    planner=torch.distributed.checkpoint.DefaultSavePlanner(),
)
from accelerate.state import PartialState
PartialState(cpu=True)
merged = _distributed_checkpoint_to_merged_weights(folder + "/pytorch_model_fsdp_0", folder + "/merged")
loaded = safetensors.torch.load_file(merged)
assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
"""

TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import dcp_all as dcp
import dcp_io
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch.utils.data import DataLoader

{plugin}

class Model(LightningModule):
    def __init__(self, width=2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, width)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, self.global_step))
        return self.layer(batch).square().sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

def fit(folder, steps, plugins, resumed_from=None):
    keeping = ModelCheckpoint(folder, every_n_train_steps=2, save_last=True, save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", devices=1, plugins=plugins, callbacks=[keeping], logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=4), ckpt_path=resumed_from)
    (optimizer,) = trainer.optimizers
    state = [value.tolist() for each in optimizer.state.values() for value in each.values()]
    values = [value.tolist() for value in model.state_dict().values()]
    return model, [
        values, state, optimizer.param_groups[0]["lr"], trainer.global_step, trainer.current_epoch,
        trainer.fit_loop.state_dict(), keeping.best_model_path.removeprefix(folder),
    ]

def interrupted(folder, plugins):
    fit(folder, {first}, plugins)
    return fit(folder, {last}, plugins, folder + "/last.ckpt")

folder = sys.argv[1]
_, whole = fit(folder + "/whole", {last}, [DcpIO()])
resumed_model, resumed = interrupted(folder + "/parts", [DcpIO()])
oracle_model, oracle = interrupted(folder + "/oracle", [])
assert resumed == oracle
assert resumed_model.seen == oracle_model.seen
assert resumed[2:4] == whole[2:4] and resumed[3] == {last}
if {first} % 4 == 0:  # in an epoch Lightning begins with the first batch again
    assert resumed[:2] == whole[:2]
newest = dcp.latest_valid(folder + "/parts")
assert newest.step == {last} and newest.path.name.endswith("step={last}.ckpt"), newest
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("lightning", LIGHTNING), ("accelerate", ACCELERATE)])
def test_their_own_code_on_ours(package: str, code: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: `nox -s frameworks` installs it")
    command = [sys.executable, "-c", REPLACED + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last"), [(4, 12), (6, 14)], ids=["at the end of an epoch", "in an epoch"])
def test_the_plugin_of_the_manager_page_resumes_the_real_trainer(first: int, last: int, tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning: `nox -s frameworks` installs it")
    page = (Path(__file__).parents[2] / "docs" / "manager.md").read_text()
    begin = page.index("class DcpIO:")
    plugin = page[begin : page.index("\n\n\n", begin)]
    plugin = plugin.replace("class DcpIO:  # (lightning.pytorch.plugins.io.CheckpointIO)", "class DcpIO(CheckpointIO):")
    assert "(CheckpointIO)" in plugin
    code = TRAINER.replace("{plugin}", plugin).replace("{first}", str(first)).replace("{last}", str(last))
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
