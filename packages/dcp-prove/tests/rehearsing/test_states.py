"""States of jobs: models, files, checkpoints and functions."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import click
import pytest
import torch

from dcp_base import DcpError
from dcp_core import ByteStorageWriter, save
from dcp_io import LocalStore, StoreBackend
from dcp_manifest import CheckpointNotFoundError
from dcp_prove.rehearsing.states import read_tensors


class FolderWriter(ByteStorageWriter):
    def _open(self, checkpoint_id):
        return StoreBackend(LocalStore(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True


@pytest.mark.parametrize(
    ("model", "parameters"), [("llama-3-8b", 8.03e9), ("llama-3-70b", 70.6e9), ("llama-3-405b", 405.9e9)]
)
def test_models_have_their_parameters_and_two_moments(model: str, parameters: float) -> None:
    tensors = read_tensors(model)
    assert sum(math.prod(shape) for _, shape, _ in tensors) == pytest.approx(3 * parameters, rel=0.005)
    assert len({name for name, _, _ in tensors}) == len(tensors)


def test_a_file_lists_tensors(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[tensors]\nw = { shape = [4, 2], dtype = "bfloat16", count = 2 }\n"a.b" = { shape = [] }\n')
    assert read_tensors(str(path)) == [("w.0", (4, 2), "bfloat16"), ("w.1", (4, 2), "bfloat16"), ("a.b", (), "float32")]


def test_a_checkpoint_lists_its_tensors(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(6, 2)}, "scale": torch.ones((), dtype=torch.float64), "step": 3}
    save(state, storage_writer=FolderWriter(tmp_path / "step-3"))
    found = read_tensors(str(tmp_path / "step-3"))
    assert sorted(found) == [("model.w", (6, 2), "float32"), ("scale", (), "float64")]


def make_state():
    return {"model": {"w": torch.empty(8, 2, device="meta")}, "moments": [torch.zeros(3)], "step": 7}


def test_a_function_returns_a_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "job_of_a_test", sys.modules[__name__])
    assert read_tensors("job_of_a_test:make_state") == [("model.w", (8, 2), "float32"), ("moments.0", (3,), "float32")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("w = 3", "has no tensors"),
        ("tensors = 3", "write lines like"),
        ("[tensors]\nw = { dtype = 'float32' }", "'w' must have a shape"),
        ("[tensors]\nw = { shape = [2, -1] }", r"the shape \[2, -1\]"),
        ("[tensors]\nw = { shape = [2], dtype = 'float33' }", "'float33'"),
        ("[tensors]\nw = { shape = [2], count = 0 }", "the count 0"),
        ("[tensors", "write lines like"),
    ],
)
def test_a_file_that_lists_no_tensors_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(click.BadParameter, match=message) as caught:
        read_tensors(str(tmp_path / "job.toml"))
    assert str(tmp_path / "job.toml") in caught.value.message


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ("llama-9", click.BadParameter, "neither a model .llama-3-8b,"),
        ("none.toml", click.BadParameter, "there is no file none.toml"),
        ("no_such_module:state", DcpError, "no_such_module"),
        ("math:pi", click.BadParameter, "math:pi is not a function"),
        ("builtins:list", click.BadParameter, "returns a list"),
        ("builtins:dict", click.BadParameter, "has no tensors"),
    ],
)
def test_a_state_that_is_none_is_refused(state: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        read_tensors(state)
    assert re.search(message, getattr(caught.value, "message", str(caught.value)))


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        read_tensors(str(tmp_path))
