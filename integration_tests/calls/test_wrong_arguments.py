"""What people pass by mistake, and what notebooks print: each error says what to pass, each repr is short."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp

MODEL = torch.nn.Linear(2, 2)
MISTAKES: dict[str, tuple[Any, str]] = {
    "a model": (MODEL, r"not a Linear: pass \{'model': model\}, or model.state_dict\(\)"),
    "an optimizer": (torch.optim.SGD(MODEL.parameters()), "not a SGD: pass"),
    "parameters": (MODEL.parameters(), "not a generator: pass a dict"),
    "pairs": ([*MODEL.named_parameters()], "not a list: pass a dict"),
    "a tensor": (torch.ones(2), "not a Tensor: pass a dict"),
    "nothing": (None, "not a NoneType: pass a dict"),
}
CALLS: dict[str, Callable[[Any, Path], Any]] = {
    "save": lambda state, place: dcp.save(state, checkpoint_id=place, no_dist=True),
    "load": lambda state, place: dcp.load(state, checkpoint_id=place, no_dist=True),
    "async_save": lambda state, place: dcp.async_save(state, checkpoint_id=place, no_dist=True).result(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_state_dict(tmp_path: Path, call: str, mistake: str) -> None:
    value, said = MISTAKES[mistake]
    with pytest.raises(TypeError, match=f"a state dict is a dict of names and values, {said}"):
        CALLS[call](value, tmp_path / "c")
    assert not [*tmp_path.glob("c/*.metadata")]


@pytest.mark.parametrize("call", ["save", "load"])
@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors", "weights.pt/step-1"])
def test_a_file_is_no_checkpoint(tmp_path: Path, call: str, name: str) -> None:
    file = tmp_path / name.partition("/")[0]
    file.write_bytes(b"x")
    with pytest.raises(NotADirectoryError, match=f"{re.escape(str(file))} is a file") as caught:
        CALLS[call]({"w": torch.ones(2)}, tmp_path / name)
    advice = f"`dcp convert {file} FOLDER`"
    assert advice in str(caught.value) or (call, name) == ("load", "weights.pt/step-1")


def test_what_is_returned_has_a_short_repr(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.ones(2) for number in range(2000)}
    place = tmp_path / "c"
    returned = [
        dcp.save(state, checkpoint_id=place, no_dist=True),
        dcp.load(state, checkpoint_id=place, no_dist=True),
        dcp.async_save(state, checkpoint_id=tmp_path / "d", no_dist=True).result(),
        dcp.FileSystemReader(place).read_metadata(),
    ]
    for value in returned:
        assert len(repr(value)) < 300
        assert "2000" in repr(value).replace(",", "")
