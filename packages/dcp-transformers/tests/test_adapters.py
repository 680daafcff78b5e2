"""Checkpoints of PEFT models hold what is trained, resume, and export what PEFT itself would save."""

from __future__ import annotations

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
from dcp_state import app_state
from dcp_transformers import export_adapter, export_model, manage_checkpoints
from dcp_transformers.export import describe_model

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
KINDS = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", **LORA),
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
        model.add_adapter("second", KINDS[kind]())
    checkpoint = tmp_path / "checkpoint-1"
    save({"app": app_state(model, trainable_only=True), **describe_model(model)}, checkpoint_id=checkpoint)
    assert {*load_keys("app.model", checkpoint_id=checkpoint)["app"]["model"]} == {*trained(model)}
    export_adapter(checkpoint, tmp_path / "ours")
    model.save_pretrained(tmp_path / "peft", selected_adapters=["default"])
    same_files(tmp_path / "ours", tmp_path / "peft")
    again = dict(peft.PeftModel.from_pretrained(base(), tmp_path / "ours").named_parameters())
    for name, value in trained(model).items():
        assert torch.equal(value, again[name]), name


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
