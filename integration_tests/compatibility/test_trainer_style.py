"""A pre-training loop's way (as torchtitan has it): stateful parts, three ways to save, Hugging Face export, discovery.

Every call is made through a module that is looked up by name: `torch.distributed.checkpoint` or `dcp_all`.
"""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

STOCK, OURS = "torch.distributed.checkpoint", "dcp_all"


class Parts:
    """Several chunks of a model as one stateful value."""

    def __init__(self, library: str, parts: list[nn.Module]) -> None:
        self.tools = importlib.import_module(f"{library}.state_dict")
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {key: value for part in self.parts for key, value in self.tools.get_model_state_dict(part).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = self.tools.StateDictOptions(strict=False)
        for part in self.parts:
            self.tools.set_model_state_dict(part, model_state_dict=state_dict, options=options)


class Optimizers:
    """The optimizers of all chunks, by flat names."""

    def __init__(self, library: str, parts: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        self.tools = importlib.import_module(f"{library}.state_dict")
        self.pairs = list(zip(parts, optimizers, strict=True))
        self.options = self.tools.StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        found = (self.tools.get_optimizer_state_dict(*pair, options=self.options) for pair in self.pairs)
        return {key: value for each in found for key, value in each.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, optimizer in self.pairs:
            self.tools.set_optimizer_state_dict(part, optimizer, optim_state_dict=state_dict, options=self.options)


class Progress:
    def __init__(self) -> None:
        self.step, self.losses = 0, torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step, dtype=torch.int32),
            "losses": self.losses,
            "epochs": {"done": self.step},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.losses = int(state_dict["step"]), state_dict["losses"]
        assert state_dict["epochs"]["done"] == self.step


class Trainer:
    def __init__(self, library: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.parts: list[nn.Module] = [nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))]
        for part in self.parts:
            fully_shard(part)
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01 * (seed + 1)) for part in self.parts]
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            part(torch.ones(2, 6)).sum().backward()
            optimizer.step()
        self.progress = Progress()
        self.states = {
            "model": Parts(library, self.parts),
            "optimizer": Optimizers(library, self.parts, list(self.optimizers)),
            "train_state": self.progress,
        }

    def fingerprint(self) -> list[list[float]]:
        values = [*self.states["model"].state_dict().values(), *self.states["optimizer"].state_dict().values()]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        locals_ = [value.to_local() if hasattr(value, "to_local") else value for value in tensors]
        return [value.double().flatten().tolist() for value in locals_]


def _save(library: str, folder: str, how: str) -> None:
    dcp = importlib.import_module(library)
    saver = importlib.import_module(f"{library}.state_dict_saver")
    staging = importlib.import_module(f"{library}.staging")
    trainer = Trainer(library, seed=0)
    trainer.progress.step = 7
    where = f"{folder}/step-7"
    group = dist.new_group(backend="gloo") if how != "at once" else None
    if how == "at once":
        dcp.save(trainer.states, checkpoint_id=where)
    elif how == "in a thread":
        dcp.async_save(trainer.states, storage_writer=None, checkpoint_id=where, process_group=group).result(120)
    else:
        stager = staging.DefaultStager(staging.StagingOptions(False, False, True, False))
        answer = dcp.async_save(
            trainer.states,
            checkpoint_id=where,
            process_group=group,
            async_checkpointer_type=saver.AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        assert isinstance(answer, saver.AsyncSaveResponse)
        answer.staging_completion.result(120)
        answer.upload_completion.result(120)
        stager.close()
    dist.barrier()


def _resume(library: str, folder: str) -> bool:
    dcp = importlib.import_module(library)
    saved, resumed = Trainer(library, seed=0), Trainer(library, seed=1)
    assert saved.fingerprint() != resumed.fingerprint()
    steps = [int(found[1]) for path in Path(folder).iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))]
    complete = [step for step in steps if (Path(folder) / f"step-{step}" / ".metadata").is_file()]
    states = dict(resumed.states)
    dcp.load(states, checkpoint_id=f"{folder}/step-{max(complete)}")
    dist.barrier()
    return resumed.progress.step == 7 and saved.fingerprint() == resumed.fingerprint()


def _quietly(call: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*args)


WAYS = [
    "at once",
    pytest.param("in a thread", marks=pytest.mark.slow),
    pytest.param("in a process", marks=pytest.mark.slow),
]


@pytest.mark.interop
@pytest.mark.parametrize("how", WAYS)
def test_what_is_saved_with_one_import_changed_resumes_under_both(ranks: Any, tmp_path: Path, how: str) -> None:
    ranks.run(2, _quietly, _save, OURS, str(tmp_path), how)
    for library in (OURS, STOCK):
        assert ranks.run(2, _quietly, _resume, library, str(tmp_path)) == [True, True], library


@pytest.mark.interop
def test_what_stock_saved_resumes_with_one_import_changed(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, _quietly, _save, STOCK, str(tmp_path), "at once")
    assert ranks.run(2, _quietly, _resume, OURS, str(tmp_path)) == [True, True]


def _export(library: str, folder: str) -> None:
    hf = importlib.import_module(library)
    consolidate = importlib.import_module(f"{library}._consolidate_hf_safetensors")
    trainer = Trainer(library, seed=0)
    state = trainer.states["model"].state_dict()
    mapping = {name: 1 + number % 2 for number, name in enumerate(sorted(state))}
    writer = hf.HuggingFaceStorageWriter(
        path=f"{folder}/sharded", save_distributed=True, fqn_to_index_mapping=mapping, enable_consolidation=False
    )
    hf.save(state, storage_writer=writer)
    consolidate.consolidate_safetensors_files_on_every_rank(
        input_dir=f"{folder}/sharded", output_dir=folder, fqn_to_index_mapping=mapping, num_threads=2
    )
    dist.barrier()


def _read_export(library: str, folder: str) -> list[float]:
    hf = importlib.import_module(library)
    state = {name: torch.zeros_like(value) for name, value in Trainer(library, 0).states["model"].state_dict().items()}
    hf.load(state, storage_reader=hf.HuggingFaceStorageReader(path=folder))
    return [float(value.full_tensor().double().sum()) for _, value in sorted(state.items())]


@pytest.mark.interop
def test_the_export_to_hugging_face(ranks: Any, tmp_path: Path) -> None:
    found = {}
    for library in (OURS, STOCK):
        folder = tmp_path / library
        ranks.run(2, _quietly, _export, library, str(folder))
        assert len(list(folder.glob("model-0000?-of-00002.safetensors"))) == 2
        found[library] = ranks.run(2, _quietly, _read_export, OURS, str(folder))
    assert found[OURS] == found[STOCK]
