"""What the package offers is found by entry point alone, and does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dcp_acme import watch
from dcp_acme.adapter import Shell
from dcp_acme.storage import VaultWriter
from dcp_acme.vault import VAULT_VARIABLE, folder_of, open_store
from dcp_core import UnsafeCheckpointError, UnsupportedValueError, load, plugins, save
from dcp_format import convert
from dcp_io import find_checkpoints
from dcp_state import get_model_state_dict

OFFERS = {
    "storage": ("acme",),
    "stores": ("acme",),
    "transforms": ("block.acme-deflate",),
    "state_adapters": ("acme-shell",),
    "converters": ("npz",),
}


def test_one_plugin_offers_all_of_it() -> None:
    (info,) = [info for info in plugins.list() if info.distribution == "dcp-acme 0.1.0"]
    assert info.error is None
    assert dict(info.offers) == OFFERS


def test_finding_it_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dcp_core import plugins; plugins.list();"
        "print(sorted(name for name in sys.modules if name.startswith('dcp_acme')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    assert done.stdout.strip() == "['dcp_acme', 'dcp_acme.plugin', 'dcp_acme.watch']"


def test_storage_transform_and_observer(root: Path) -> None:
    weight = torch.arange(100_000) % 7
    save(
        {"weight": weight},
        storage_writer=VaultWriter("acme://team/compressed", deflate=True),
    )
    state = {"weight": torch.zeros_like(weight)}
    load(state, checkpoint_id="acme://team/compressed")
    assert torch.equal(state["weight"], weight)
    stored = sum(
        path.stat().st_size for path in folder_of("acme://team/compressed").iterdir()
    )
    assert stored < weight.nbytes / 10
    saved, loaded = watch.last_operations()[-2:]
    assert (saved.operation, loaded.operation, loaded.checkpoint_id) == (
        "save",
        "load",
        "acme://team/compressed",
    )


def test_the_vault_is_found_without_torch(root: Path) -> None:
    save({"weight": torch.ones(2)}, checkpoint_id="acme://listed/step-1")
    assert [
        found.path.name for found in find_checkpoints(folder_of("acme://listed"))
    ] == ["step-1"]
    code = (
        "import sys; from dcp_io import open_store;"
        "print(open_store(sys.argv[1]).exists('.metadata'), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "acme://listed/step-1"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=250
    )
    assert done.stdout.split() == ["True", "False"]


def test_names_with_and_without_the_wrapper(root: Path) -> None:
    model = nn.Sequential(Shell(nn.Linear(3, 2)), nn.ReLU())
    assert sorted(get_model_state_dict(model)) == ["0.bias", "0.weight"]


def test_conversion_both_ways(root: Path, tmp_path: Path) -> None:
    state = {
        "a": torch.arange(6.0).reshape(2, 3),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(3),
    }
    save(state, checkpoint_id=str(tmp_path / "checkpoint"))
    convert(tmp_path / "checkpoint", tmp_path / "arrays.npz")
    with np.load(tmp_path / "arrays.npz", allow_pickle=False) as arrays:
        assert {name: arrays[name].tolist() for name in arrays} == {
            name: value.tolist() for name, value in state.items()
        }
    convert(tmp_path / "arrays.npz", tmp_path / "again")
    loaded = {name: torch.zeros_like(value) for name, value in state.items()}
    load(loaded, checkpoint_id=str(tmp_path / "again"))
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_what_numpy_cannot_hold_is_refused_whole(tmp_path: Path) -> None:
    save(
        {"a": torch.ones(2, dtype=torch.bfloat16)},
        checkpoint_id=str(tmp_path / "checkpoint"),
    )
    with pytest.raises(UnsupportedValueError, match=r"'a'.*bfloat16"):
        convert(tmp_path / "checkpoint", tmp_path / "arrays.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_ids_that_lead_nowhere_are_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsafeCheckpointError, match="leads out of the vault"):
        save({}, checkpoint_id="acme://team/../../etc")
    with pytest.raises(ValueError, match="acme://team/run"):
        folder_of("/team/run")
    with pytest.raises(ValueError, match="options"):
        open_store("acme://team/run", storage_options={"region": "x"})
    monkeypatch.delenv(VAULT_VARIABLE)
    with pytest.raises(ValueError, match=VAULT_VARIABLE):
        folder_of("acme://team/run")
