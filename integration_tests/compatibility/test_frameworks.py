"""Lightning's and accelerate's own functions, in processes where one import is changed for them.

`torch.distributed.checkpoint` means `dcp_all` there, by `sys.modules`: their code runs as it is.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CHANGED_IMPORT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import dcp_all
import importlib, pkgutil
for module in pkgutil.iter_modules(dcp_all.__path__):
    importlib.import_module(f"dcp_all.{module.name}")
for name in [name for name in sys.modules if name.split(".")[0] == "dcp_all"]:
    sys.modules["torch.distributed.checkpoint" + name.removeprefix("dcp_all")] = sys.modules[name]
torch.distributed.checkpoint = dcp_all
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
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

{callback}

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

def fit(model, steps, callback):
    options = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(max_steps=steps, accelerator="cpu", devices=1, callbacks=[callback], **options)
    trainer.fit(model, DataLoader(torch.ones(64, 4), batch_size=4))

class Seen(DcpCheckpoint):
    def on_train_start(self, trainer, module):
        super().on_train_start(trainer, module)
        self.began_with = module.layer.weight.detach().clone()

first = Seen(sys.argv[1], save_policy=dcp.EverySteps(2), no_dist=True)
model = Model()
fit(model, 4, first)
assert first.restored is None
assert first.manager.latest() == 4
second = Seen(sys.argv[1], save_policy=dcp.EverySteps(2), no_dist=True)
fit(Model(), 1, second)
assert second.restored.step == 4
assert torch.equal(second.began_with, model.layer.weight)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("lightning", LIGHTNING), ("accelerate", ACCELERATE)])
def test_their_own_code_with_one_import_changed(package: str, code: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: `nox -s frameworks` installs it")
    command = [sys.executable, "-c", CHANGED_IMPORT + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_callback_of_the_manager_page_with_the_real_trainer(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("needs lightning: `nox -s frameworks` installs it")
    page = (Path(__file__).parents[2] / "docs" / "manager.md").read_text()
    first = page.index("class DcpCheckpoint:")
    callback = page[first : page.index("\nclass Trainer:", first)]
    callback = callback.replace("class DcpCheckpoint:  # (lightning.Callback)", "class DcpCheckpoint(Callback):")
    assert "(Callback)" in callback
    command = [sys.executable, "-c", TRAINER.replace("{callback}", callback), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
