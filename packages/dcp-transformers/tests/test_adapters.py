"""Checkpoints of PEFT models hold what is trained, resume, and export what PEFT itself would save."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers
from safetensors.torch import load_file

from dcp_core import load_keys, save
from dcp_core.errors import UnsupportedFormatError
from dcp_format import WriteOptions, convert
from dcp_io import CheckpointExistsError
from dcp_state import app_state
from dcp_transformers import export_adapter, export_model, manage_checkpoints
from dcp_transformers.export import describe_model

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
KINDS = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
    "larger than a piece that is read": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **{**LORA, "r": 1 << 15}),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", use_dora=True, **LORA),
    "modules to save": lambda: peft.LoraConfig(task_type="CAUSAL_LM", modules_to_save=["lm_head"], **LORA),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def base() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


def trained(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def same_files(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_peft_saves(tmp_path: Path, kind: str) -> None:
    model = peft.get_peft_model(base(), KINDS[kind]())
    if kind == "LoRA":
        for name in ("second", "frozen"):
            model.add_adapter(name, KINDS[kind]())
        model.base_model.set_adapter(["default", "second"])
    checkpoint = tmp_path / "checkpoint-1"
    save({"app": app_state(model, trainable_only=True), **describe_model(model)}, checkpoint_id=checkpoint)
    assert {*load_keys("app.model", checkpoint_id=checkpoint)["app"]["model"]} == {*trained(model)}
    export_adapter(checkpoint, tmp_path / "ours")
    model.save_pretrained(tmp_path / "peft", selected_adapters=[*model.peft_config])
    same_files(tmp_path / "ours", tmp_path / "peft")
    done = convert(checkpoint, tmp_path / "converted", format="peft")
    assert (done.format, done.tensors) == ("peft", len(trained(model)))
    assert not (tmp_path / "converted" / "frozen").exists()
    for folder in ("", "second") if kind == "LoRA" else ("",):
        same_files(tmp_path / "converted" / folder, tmp_path / "peft" / folder)
        configurations = [tmp_path / made / folder / "adapter_config.json" for made in ("converted", "peft")]
        ours, theirs = (json.loads(file.read_text()) for file in configurations)
        assert ours == theirs
    again = dict(peft.PeftModel.from_pretrained(base(), tmp_path / "ours").named_parameters())
    for name, value in trained(model).items():
        assert "second" in name or torch.equal(value, again[name]), name


def test_what_is_not_exported(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), KINDS["LoRA"]())
    state = {"app": app_state(model, trainable_only=True), **describe_model(model)}
    save(state, checkpoint_id=tmp_path / "checkpoint-1")
    convert(tmp_path / "checkpoint-1", tmp_path / "adapter", format="peft")
    assert {*os.listdir(tmp_path / "adapter")} == {"adapter_model.safetensors", "adapter_config.json"}
    with torch.no_grad():
        for value in trained(model).values():
            value += 1
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "checkpoint-1", tmp_path / "adapter", format="peft")
    options = WriteOptions(overwrite=True)
    convert(tmp_path / "checkpoint-1", tmp_path / "adapter", format="peft", options=options)
    model.add_adapter("frozen", KINDS["LoRA"]())
    save(
        {"app": app_state(model, trainable_only=True), **describe_model(model)}, checkpoint_id=tmp_path / "checkpoint-4"
    )
    with pytest.raises(ValueError, match=r"lacks values of the adapter 'frozen', such as .*lora_A\.frozen"):
        export_adapter(tmp_path / "checkpoint-4", tmp_path / "other", adapter="frozen")
    save({"app": app_state(model, trainable_only=True)}, checkpoint_id=tmp_path / "checkpoint-2")
    with pytest.raises(UnsupportedFormatError, match=r"does not describe its model.*describe_model"):
        convert(tmp_path / "checkpoint-2", tmp_path / "other", format="peft")
    save({"app": app_state(base()), **describe_model(base())}, checkpoint_id=tmp_path / "checkpoint-3")
    with pytest.raises(ValueError, match="no PEFT adapter; use export_model"):
        convert(tmp_path / "checkpoint-3", tmp_path / "other", format="peft")
    hostile = state["description"].replace('"default": {', '"/tmp/default": {')
    save({**state, "description": hostile}, checkpoint_id=tmp_path / "checkpoint-5")
    with pytest.raises(ValueError, match="is a path"):
        convert(tmp_path / "checkpoint-5", tmp_path / "other", format="peft")
    assert not (tmp_path / "other").exists()


def test_mistakes_are_named(tmp_path: Path) -> None:
    model = peft.get_peft_model(base(), KINDS["LoRA"]())
    checkpoint = tmp_path / "checkpoint-1"
    save({"app": app_state(model, trainable_only=True), **describe_model(model)}, checkpoint_id=checkpoint)
    with pytest.raises(ValueError, match="no adapter 'other'; its adapters: 'default'"):
        export_adapter(checkpoint, tmp_path / "ours", adapter="other")
    with pytest.raises(ValueError, match="use export_adapter"):
        export_model(checkpoint, tmp_path / "ours")


def test_a_trainer_saves_and_resumes_the_adapter_alone(tmp_path: Path, make_trainer: Callable[..., Any]) -> None:
    def make(folder: str, **arguments: Any) -> Any:
        trainer = make_trainer(folder, **arguments)
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, config)
        return trainer

    whole = make("whole")
    whole.train()
    stopped = make("managed", stop=6)
    manage_checkpoints(stopped)
    with pytest.raises(InterruptedError):
        stopped.train()
    (checkpoint,) = Path(stopped.args.output_dir).glob("checkpoint-*")
    assert {*load_keys("app.model", checkpoint_id=checkpoint)["app"]["model"]} == {*trained(stopped.model)}
    resumed = make("managed")
    manage_checkpoints(resumed)
    resumed.train(resume_from_checkpoint=True)
    for name, value in trained(resumed.model).items():
        assert torch.equal(value, trained(whole.model)[name]), name
