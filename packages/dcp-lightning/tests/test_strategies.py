"""Training on several processes with Lightning's own launcher: resume on other world sizes, shards, kills.

`TRAIN` and `FABRIC` are run as scripts: Lightning starts them once more for each further rank.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dcp_io
from dcp_fs import FileSystemReader
from dcp_io.saves.cleanup import read_current

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
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dcp_lightning import DcpCheckpointIO
from dcp_lightning.strategies import DcpDDPStrategy, DcpFSDPStrategy, DcpModelParallelStrategy
from dcp_state import StateDictOptions, get_model_state_dict

ranks, jobs, result = json.loads(sys.argv[1])
replicas = {"tensor parallel": max(1, ranks // 2)}  # of a kind whose ranks do not all get other samples


class Model(LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
        self.losses = []

    def configure_model(self):
        if isinstance(self.net, (FSDPModule, FullyShardedDataParallel)):
            return  # Lightning calls this for each fit and test
        if self.kind == "fsdp":  # what Lightning wraps itself needs a GPU
            on_cpu = {"device_id": torch.device("cpu"), "use_orig_params": True}
            for name in ("0", "2"):
                self.net.register_module(name, FullyShardedDataParallel(self.net.get_submodule(name), **on_cpu))
            self.net = FullyShardedDataParallel(self.net, **on_cpu)
        if self.kind == "tensor parallel":
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.kind in ("model parallel", "tensor parallel"):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        whole = loss.detach().clone()  # of all ranks: the same samples whatever the world size
        if ranks > 1:
            dist.all_reduce(whole)
        self.losses.append((self.trainer.global_step, whole.item() / ranks))
        return loss

    def test_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(kind, folder, steps, resumed_from=None, background=None, killed_in=None, tested=None, samples=16):
    strategy = {
        "model parallel": lambda: DcpModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
        "tensor parallel": lambda: DcpModelParallelStrategy(replicas[kind], ranks // replicas[kind]),
        "fsdp": DcpFSDPStrategy,
        "ddp": DcpDDPStrategy,
        "lightning's ddp": lambda: "ddp",
    }[kind]()
    trainer = Trainer(
        max_steps=steps, accelerator="cpu", devices=ranks, strategy=strategy,
        plugins=[DcpCheckpointIO(background=background)],
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_last=True)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )
    replace = os.replace

    def killed(source, target):
        if str(target).endswith(".metadata") and [trainer.global_step, Path(target).parent.name] == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)  # all data is there, the index is not
        replace(source, target)

    os.replace = killed
    samples = TensorDataset(torch.linspace(-1, 1, samples * 8).reshape(samples, 8).sin())  # 8 of all ranks make a step
    model = Model(kind)
    trainer.fit(model, DataLoader(samples, batch_size=8 // replicas.get(kind, ranks)), ckpt_path=resumed_from)
    os.replace = replace
    weights = get_model_state_dict(trainer.strategy.model, options=StateDictOptions(full_state_dict=True)).values()
    found = {
        "losses": model.losses,
        "weights": [value.tolist() for value in weights],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
    }
    if tested is not None:
        trainer.test(model, DataLoader(samples, batch_size=8), ckpt_path=tested, verbose=False)
    return found


found = [train(**job) for job in jobs]
if int(os.environ.get("LOCAL_RANK", "0")) == 0:
    Path(result).write_text(json.dumps(found))
"""

FABRIC = """
import json, os, sys, warnings
from pathlib import Path

warnings.simplefilter("ignore")
import torch
from lightning.fabric import Fabric
from torch.distributed.fsdp import fully_shard

from dcp_lightning import DcpCheckpointIO
from dcp_lightning.fabric import DcpDDPStrategy, DcpModelParallelStrategy

ranks, jobs, result = json.loads(sys.argv[1])


def train(kind, folder, steps, resumed_from=None, background=None):
    strategy = {
        "model parallel": lambda: DcpModelParallelStrategy(
            lambda module, mesh: fully_shard(module, mesh=mesh["data_parallel"]), ranks, 1
        ),
        "ddp": DcpDDPStrategy,
        "lightning's ddp": lambda: "ddp",
    }[kind]()
    plugin = DcpCheckpointIO(background=background)
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=[plugin])
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(torch.nn.Linear(8, 4))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.05))
    state, left, losses = {"model": model, "optimizer": optimizer, "step": 0}, {}, []
    if resumed_from is not None:
        left = fabric.load(resumed_from, state)
        try:
            fabric.load(resumed_from, {**state, "absent": 0})
        except KeyError as error:
            assert "absent" in str(error), error
        else:
            raise AssertionError("an entry that the checkpoint lacks is an error")
    samples = torch.linspace(-1, 1, 64).reshape(8, 8).sin().chunk(ranks)[fabric.global_rank]
    while state["step"] < steps:
        loss = model(samples).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((state["step"], fabric.all_reduce(loss.detach()).item()))
        state["step"] += 1
    fabric.save(folder, {**state, "note": "of rank 0"})
    plugin.teardown()
    return {"losses": losses, "left": left}


found = [train(**job) for job in jobs]
if int(os.environ.get("LOCAL_RANK", "0")) == 0:
    Path(result).write_text(json.dumps(found))
"""

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | {"OMP_NUM_THREADS": "1"}
KINDS = ["model parallel", "ddp", "lightning's ddp"]
MOVED = [*KINDS, "tensor parallel", "fsdp"]

pytestmark = pytest.mark.timeout(660)  # the first test of a module's runs waits for three of them


def launch(folder: Path, script: str, ranks: int, jobs: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Run a script on so many ranks, in a session of its own, and end what is left of it."""
    file = folder / "train.py"
    file.write_text(script)
    started = subprocess.Popen(
        [sys.executable, str(file), json.dumps([ranks, jobs, str(folder / "result")])],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    )
    try:
        output, _ = started.communicate(timeout=200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess([], started.returncode, output)


def train(folder: Path, script: str, ranks: int, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run jobs that have to succeed, one after the other, and return what they found."""
    (folder / "result").unlink(missing_ok=True)
    done = launch(folder, script, ranks, list(jobs))
    assert done.returncode == 0, done.stdout
    found: list[dict[str, Any]] = json.loads((folder / "result").read_text())
    return found


def last(folder: Path) -> str:
    return str(folder / "last.ckpt")


def losses(*parts: dict[str, Any]) -> list[float]:
    """The losses of runs that follow each other, whose steps have no gap."""
    found = [each for part in parts for each in part["losses"]]
    assert [step for step, _ in found] == [*range(len(found))]
    return [loss for _, loss in found]


def moved(folder: Path, kind: str, **others: Any) -> dict[str, Any]:
    """Return a job that goes on on other world sizes.

    Its epochs have one step: after a second resume Lightning shuffles an epoch as the one before, whoever has saved.
    """
    return {"kind": kind, "folder": str(folder / "moved" / kind), "samples": 8, **others}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each kind on two ranks: an uninterrupted run, the first half of another, and the beginning of a third."""
    jobs = []
    for kind in KINDS:
        jobs.append({"kind": kind, "folder": str(folder / kind / "whole"), "steps": 8})
        jobs.append({"kind": kind, "folder": str(folder / kind / "parts"), "steps": 4, "background": "process"})
    jobs += [moved(folder, kind, steps=2) for kind in MOVED]
    found = train(folder, TRAIN, 2, *jobs)
    pairs = {kind: found[2 * place : 2 * place + 2] for place, kind in enumerate(KINDS)}
    return {"moved": found[2 * len(KINDS) :], **pairs}


@pytest.fixture(scope="module")
def resumed(folder: Path, on_two: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The second halves, of other processes; and one with another strategy."""
    ddp = last(folder / "ddp" / "parts")
    jobs = [{"kind": "model parallel", "folder": str(folder / "crossed"), "steps": 8, "resumed_from": ddp}]
    jobs += [
        {"kind": kind, "folder": str(folder / kind / "parts"), "steps": 8, "resumed_from": "last"} for kind in KINDS
    ]
    return dict(zip(["crossed", *KINDS], train(folder, TRAIN, 2, *jobs), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_by_bit(kind: str, on_two: Any, resumed: Any) -> None:
    whole, part = on_two[kind]
    assert losses(part, resumed[kind]) == losses(whole)
    assert {**resumed[kind], "losses": None} == {**whole, "losses": None}
    assert whole["step"] == 8


def test_a_strategy_resumes_what_another_has_saved(on_two: Any, resumed: Any) -> None:
    assert losses(on_two["ddp"][1], resumed["crossed"]) == pytest.approx(losses(on_two["ddp"][0]), rel=1e-5)


@pytest.fixture(scope="module")
def on_four(folder: Path, on_two: Any) -> dict[str, dict[str, Any]]:
    """What begun on two ranks goes on with four; in the background for one kind."""
    del on_two
    written = {kind: writers(folder / "moved" / kind) for kind in MOVED}
    assert written["model parallel"] == written["tensor parallel"] == written["fsdp"] == {0, 1}
    jobs = [moved(folder, kind, steps=4, resumed_from="last") for kind in MOVED]
    jobs[0]["background"] = "thread"
    return dict(zip(MOVED, train(folder, TRAIN, 4, *jobs), strict=True))


@pytest.fixture(scope="module")
def on_one(folder: Path, on_four: Any) -> dict[str, dict[str, Any]]:
    """And then in one process; beside an uninterrupted run."""
    del on_four
    written = {kind: writers(folder / "moved" / kind) for kind in MOVED}
    assert written["model parallel"] == written["fsdp"] == {0, 1, 2, 3}
    jobs = [moved(folder, kind, steps=6, resumed_from="last") for kind in MOVED]
    jobs[0]["tested"] = "best"
    jobs.append({**moved(folder, "ddp", steps=6), "folder": str(folder / "one")})
    return dict(zip([*MOVED, "whole"], train(folder, TRAIN, 1, *jobs), strict=True))


@pytest.mark.parametrize("kind", MOVED)
def test_from_two_ranks_to_four_to_one(kind: str, on_two: Any, on_four: Any, on_one: Any) -> None:
    parts = (on_two["moved"][MOVED.index(kind)], on_four[kind], on_one[kind])
    assert losses(*parts) == pytest.approx(losses(on_one["whole"]), rel=1e-5)
    assert {**on_one[kind], "losses": None, "weights": None} == {**on_one["whole"], "losses": None, "weights": None}


def writers(place: Path) -> set[int]:
    """The ranks that have written a part of the first weight, as the index of the checkpoint says."""
    metadata = FileSystemReader(last(place)).read_metadata()
    files = {
        info.relative_path for index, info in metadata.storage_data.items() if index.fqn == "state_dict.net.0.weight"
    }
    return {int(re.findall(r"__(\d+)_", file)[0]) for file in files}


KILLS = [  # in the save to which path, and which one is the newest then
    (KINDS[0], 6, "epoch=2-step=6.ckpt", "last.ckpt"),
    (KINDS[2], 6, "epoch=2-step=6.ckpt", "last.ckpt"),
    (KINDS[0], 2, "last.ckpt", "epoch=0-step=2.ckpt"),
]


@pytest.mark.parametrize(("kind", "step", "name", "newest"), KILLS)
def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before(
    kind: str, step: int, name: str, newest: str, tmp_path: Path
) -> None:
    common = {"kind": kind, "folder": str(tmp_path / "run"), "steps": 8}
    killed = launch(tmp_path, TRAIN, 2, [{**common, "killed_in": [step, name]}])
    assert killed.returncode != 0
    assert not (tmp_path / "result").exists()
    assert not read_current(dcp_io.open_store(tmp_path / "run" / name)).exists
    assert not dcp_io.verify_checkpoint(dcp_io.open_store(tmp_path / "run" / newest)).problems
    (found,) = train(tmp_path, TRAIN, 2, {**common, "resumed_from": "last"})
    assert [each for each, _ in found["losses"]] == [*range(4 if step == 6 else 2, 8)]


def test_fabric_goes_from_two_ranks_to_four_to_one(tmp_path: Path) -> None:
    kinds, found = ["model parallel", "ddp", "lightning's ddp"], {}
    for ranks, steps, background in ((2, 2, None), (4, 4, "thread"), (1, 6, "process")):
        jobs = [
            {"kind": kind, "folder": str(tmp_path / kind), "steps": steps, "background": background} for kind in kinds
        ]
        for job in jobs if found else ():
            job["resumed_from"] = job["folder"]
        whole = [{"kind": "ddp", "folder": str(tmp_path / "whole"), "steps": 6}] if ranks == 1 else []
        parts = train(tmp_path, FABRIC, ranks, *jobs, *whole)
        for kind, part in zip(kinds, parts, strict=False):
            assert part["left"] == ({"note": "of rank 0"} if kind in found else {})
            found.setdefault(kind, []).append(part)
    for kind in kinds:
        assert losses(*found[kind]) == pytest.approx(losses(parts[-1]), rel=1e-5), kind
