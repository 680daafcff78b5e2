from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s frameworks")

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from dcp_torchtitan import DcpCheckpointManager
from dcp_torchtitan.checkpoint_manager import export_model, load_model

# torchtitan's own manager, in a process without a group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TWO_FILES = {"model.weight": 1, "model.bias": 2}


class Renames(StateDictAdapter):
    """An adapter of a model whose names there begin with `model.`, in the files that a mapping says."""

    def __init__(self, files: dict[str, int] | None = None, folder: Path | None = None) -> None:
        self.fqn_to_index_mapping, self.hf_assets_path = files, None if folder is None else str(folder)

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in hf_state_dict.items()}


def state(start: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.arange(12.0).reshape(4, 3) + start, "bias": torch.arange(4.0) + start}


@pytest.mark.parametrize("files", [None, TWO_FILES], ids=["one file", "two files"])
def test_ranks_export_and_import_their_parts(ranks: Any, tmp_path: Path, files: dict[str, int] | None) -> None:
    def export_and_import() -> bool:
        mesh = dist.init_device_mesh("cpu", (2,))
        adapter = Renames(files)
        parts = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state(1).items()}
        export_model(adapter, parts, str(tmp_path))
        dist.barrier()
        template = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in state(0).items()}
        loaded = load_model(adapter, template, str(tmp_path), quantized=False)
        return all(torch.equal(loaded[name].full_tensor(), value) for name, value in state(1).items())

    assert ranks.run(2, export_and_import) == [True, True]
    found = {name: value for file in tmp_path.glob("*.safetensors") for name, value in load_file(file).items()}
    assert found.keys() == TWO_FILES.keys()
    assert len([*tmp_path.glob("*.safetensors")]) == (1 if files is None else 2)
    assert torch.equal(found["model.weight"], state(1)["weight"])


@pytest.mark.parametrize(
    ("exports", "imports"), [(CheckpointManager, DcpCheckpointManager), (DcpCheckpointManager, CheckpointManager)]
)
@pytest.mark.parametrize("files", [None, TWO_FILES], ids=["one file", "two files"])
def test_a_run_begins_with_what_another_has_exported(
    make_manager: Any, tmp_path: Path, exports: Any, imports: Any, files: dict[str, int] | None
) -> None:
    adapter = Renames(files, tmp_path / "before" / "step-3")
    first = make_manager(
        exports, value=5, adapter=adapter, folder="before", last_save_in_hf=True, export_dtype="bfloat16"
    )
    assert first.save(3, last_step=True)
    for options in ({"initial_load_path": adapter.hf_assets_path}, {}):
        second = make_manager(imports, adapter=adapter, initial_load_in_hf=True, **options)
        assert second.load()
        assert second.states["model"].model[0].weight[0, 0] == 5
        assert second.states["optimizer"].value[0] == 0


def test_an_export_is_no_checkpoint_and_stays(make_manager: Any, tmp_path: Path) -> None:
    adapter = Renames(TWO_FILES)
    first = make_manager(DcpCheckpointManager, adapter=adapter, last_save_in_hf=True, keep_latest_k=2)
    assert [first.save(1), first.save(2), first.save(3, last_step=True)] == [True, True, True]
    exported = {path.name for path in (tmp_path / "checkpoint" / "step-3").iterdir()}
    again = make_manager(DcpCheckpointManager, adapter=adapter, keep_latest_k=2)
    assert again.load()
    for step in (4, 5, 6):
        again.save(step)
    assert {path.name for path in (tmp_path / "checkpoint" / "step-3").iterdir()} == exported
    assert {path.name for path in (tmp_path / "checkpoint").glob("step-*")} == {"step-3", "step-5", "step-6"}


def test_what_is_missing_for_safetensors_is_said(make_manager: Any) -> None:
    with pytest.raises(ValueError, match="state_dict_adapter"):
        make_manager(DcpCheckpointManager, last_save_in_hf=True)
    for adapter in (None, Renames()):
        with pytest.raises(ValueError, match="hf_assets_path"):
            make_manager(DcpCheckpointManager, adapter=adapter, initial_load_in_hf=True).load()


class Quantizes(Renames):
    """An adapter of a model that is stored in blocks of fp8."""

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

        return QuantizedHuggingFaceStorageReader(path, target_dtype=torch.bfloat16, block_size=2)


def test_blocks_are_dequantized_as_the_adapter_says(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = {
        "model.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "model.weight_scale_inv": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    save_file(stored, tmp_path / "model.safetensors")
    template = {"weight": torch.zeros(4, 4, dtype=torch.bfloat16)}
    loaded = load_model(Quantizes(), template, str(tmp_path), quantized=True)
    assert loaded["weight"][::2, ::2].tolist() == [[1, 2], [3, 4]]
