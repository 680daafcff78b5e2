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


@pytest.mark.slow
@pytest.mark.parametrize(("package", "code"), [("lightning", LIGHTNING), ("accelerate", ACCELERATE)])
def test_their_own_code_on_ours(package: str, code: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: `nox -s frameworks` installs it")
    command = [sys.executable, "-c", REPLACED + code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
