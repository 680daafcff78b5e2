"""Exports load with `from_pretrained` as what was saved, whatever is tied, split or cast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from safetensors import safe_open

from dcp_core import save
from dcp_core.errors import UnsupportedFormatError
from dcp_format import convert
from dcp_state import app_state
from dcp_transformers import export_model
from dcp_transformers.export import describe_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "tied": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    ),
    "untied": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=False)
    ),
    "tied by choice": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "a classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)),
    "encoder and decoder": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2)
    ),
    "experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
    ),
}


def saved(model: Any, folder: Path) -> str:
    place = str(folder / "checkpoint-1")
    save({"app": app_state(model), **describe_model(model)}, checkpoint_id=place, no_dist=True)
    return place


def names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())


def loaded(kind: type, folder: Path) -> Any:
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 2000])
def test_what_was_saved_is_loaded(tmp_path: Path, name: str, max_file_bytes: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    export_model(saved(model, tmp_path), tmp_path / "hub", max_file_bytes=max_file_bytes)
    again = loaded(type(model), tmp_path / "hub")
    assert again.config.to_dict() == {**model.config.to_dict(), "architectures": [type(model).__name__]} | {
        name: again.config.to_dict()[name] for name in ("_name_or_path", "dtype", "transformers_version")
        if name in again.config.to_dict()
    }  # fmt: skip
    pairs = zip(model.state_dict().items(), again.state_dict().items(), strict=True)
    assert all(one == other and torch.equal(a, b) for (one, a), (other, b) in pairs)
    ties = model.all_tied_weights_keys
    assert all(again.get_parameter(a) is again.get_parameter(b) for a, b in ties.items())
    assert (tmp_path / "hub" / "model.safetensors.index.json").exists() == (max_file_bytes == 2000)
    written = {name for path in (tmp_path / "hub").glob("*.safetensors") for name in names(path)}
    assert not written & set(ties)


def test_as_the_model_itself_saves_it(tmp_path: Path) -> None:
    model = MODELS["tied"]()
    model.generation_config.max_new_tokens = 7
    export_model(saved(model, tmp_path), tmp_path / "hub")
    model.save_pretrained(tmp_path / "theirs")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "hub" / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())
    assert {path.name for path in (tmp_path / "hub").iterdir()} == {
        path.name for path in (tmp_path / "theirs").iterdir()
    }


def test_cast_with_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model = MODELS["tied"]()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    export_model(saved(model, tmp_path), tmp_path / "hub", processing_class=tokenizer, dtype=torch.bfloat16)
    again = loaded(type(model), tmp_path / "hub")
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight.to(torch.bfloat16))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hub").vocab_size == 1


class OfMine(transformers.GPT2LMHeadModel):  # type: ignore[name-defined,misc]
    """A class that transformers does not have."""


def test_a_class_of_ones_own(tmp_path: Path) -> None:
    model = OfMine(MODELS["tied"]().config)
    place = saved(model, tmp_path)
    with pytest.raises(ValueError, match="the class of its model is OfMine"):
        export_model(place, tmp_path / "hub")
    export_model(place, tmp_path / "hub", model=model)
    again = loaded(OfMine, tmp_path / "hub")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_checkpoint_without_a_model_of_transformers(tmp_path: Path) -> None:
    assert describe_model(torch.nn.Linear(1, 1)) == {}
    with pytest.raises(ValueError, match="the class of its model is None"):
        export_model(saved(torch.nn.Linear(2, 2), tmp_path), tmp_path / "hub")


DESCRIPTION: Any = json.loads(describe_model(MODELS["tied"]())["description"])
FOREIGN = [
    *("", "{", "null", "7", '"x"', "[]", "{}", "\0", "NaN", "a description", "\ufeff{}", "[" * 100_000),
    *(json.dumps(DESCRIPTION)[:-5], *(json.dumps({**DESCRIPTION, "config": each}) for each in ([], "x", None, 3))),
    *(json.dumps({**DESCRIPTION, "class": each}) for each in ("pipeline", "Trainer", "__name__", "GPT2Config")),
    *(
        json.dumps({**DESCRIPTION, "adapters": each})
        for each in (["x"], {"x": None}, {"x": {}}, {"x": {"peft_type": 1}})
    ),
    *(json.dumps({**DESCRIPTION, "generation_config": each}) for each in (["x"], "x", 3)),
    *(json.dumps({**DESCRIPTION, "config": {**DESCRIPTION["config"], "n_embd": each}}) for each in ("x", -1, None, {})),
    *(json.dumps({name: each for name, each in DESCRIPTION.items() if name != lost}) for lost in DESCRIPTION),
]


@pytest.mark.parametrize("to_peft", [False, True])
def test_text_that_describes_no_model_is_named(tmp_path: Path, *, to_peft: bool) -> None:
    pytest.importorskip("peft")
    for text in (*FOREIGN, 3, None, ["x"], {"class": "x"}, torch.ones(3)):
        place = tmp_path / "checkpoint-1"
        save({"app": {"model": {"x": torch.ones(1)}}, "description": text}, checkpoint_id=place)
        with pytest.raises(UnsupportedFormatError, match="describe") as caught:
            convert(place, tmp_path / "hub", format="peft") if to_peft else export_model(place, tmp_path / "hub")
        assert str(place) in str(caught.value), text
    assert not (tmp_path / "hub").exists()
