"""Exports as `transformers` loads them: whole after an export, and whole at every crash point of one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_core.testing.trees import same
from dcp_format import save_safetensors
from dcp_format.export import write_files

transformers = pytest.importorskip("transformers")

ONE, SEVERAL = 10**9, 3000


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=seed % 2 == 0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    found = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found[1][key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state: dict[str, torch.Tensor] = found[0].state_dict()
    return state


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("limit", [ONE, SEVERAL])
def test_from_pretrained(tmp_path: Path, tied: bool, limit: int) -> None:
    one = model(2 if tied else 1)
    one.config.save_pretrained(tmp_path / "config")
    save_safetensors(one.state_dict(), tmp_path / "out", max_file_bytes=limit, config_from=tmp_path / "config")
    assert same(loaded(tmp_path / "out"), dict(one.state_dict()))


@pytest.mark.parametrize("new", [ONE, SEVERAL])
@pytest.mark.parametrize("old", [ONE, SEVERAL])
@pytest.mark.parametrize("by", ["this project", "transformers"])
def test_at_each_crash_point_one_whole_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, old: int, new: int
) -> None:
    """What a killed export leaves: the folder is copied before each step of publishing."""
    first, second = model(1), model(3)
    folder, copies = tmp_path / "out", tmp_path / "copies"
    if by == "transformers":
        first.save_pretrained(folder, max_shard_size=old)
    else:
        first.config.save_pretrained(folder)
        save_safetensors(first.state_dict(), folder, max_file_bytes=old)
    points: list[Path] = []

    def copied(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            points.append(copies / str(len(points)))
            shutil.copytree(folder, points[-1])
            return call(*args, **options)

        return run

    monkeypatch.setattr(os, "replace", copied(os.replace))
    monkeypatch.setattr(os, "unlink", copied(os.unlink))
    monkeypatch.setattr(write_files.LocalStore, "sync_folder", copied(write_files.LocalStore.sync_folder))
    save_safetensors(second.state_dict(), folder, max_file_bytes=new)
    monkeypatch.undo()
    states = [dict(one.state_dict()) for one in (first, second)]
    found = []
    for point in [*points, folder]:
        state = loaded(point)
        found.append(next(number for number, wanted in enumerate(states) if same(state, wanted)))
    assert found == sorted(found), "an older model came back"
    assert (found[0], found[-1]) == (0, 1)
    assert len(points) > 2
