"""`export_model`: write a checkpoint's model as a directory for `from_pretrained` and the Hub."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import torch
import transformers

from dcp_core import load_keys
from dcp_format import WriteOptions, convert

__all__ = ["describe_model", "export_adapter", "export_model", "is_peft"]

_MODEL, _DESCRIPTION = "app.model.", "description"
_MAX_FILE_BYTES = WriteOptions().max_file_bytes


def export_model(
    checkpoint_id: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: Any = None,
    processing_class: Any = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = _MAX_FILE_BYTES,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint's model in the Hub's form: safetensors with index, configurations, tokenizer.

    Only a few MiB of tensors are in memory at a time. Tied weights are omitted, as in `save_pretrained`.

    Args:
        checkpoint_id: Path or URI of a checkpoint of a Trainer or `save_state`.
        folder: Directory to create or add to.
        model: `PreTrainedModel` of the saved class and configuration, if transformers lacks the class.
        processing_class: Tokenizer or processor to write.
        dtype: Dtype of floating-point weights; None keeps theirs.
        max_file_bytes: Maximum bytes per file.
        overwrite: Whether to replace a model in the directory.

    Raises:
        ValueError: The checkpoint does not describe its model, or transformers lacks the class.
        DcpError: The checkpoint was not found or is damaged, or a model exists.

    Ranks: one; not collective.
    """
    described = _described(checkpoint_id) if model is None else model
    if is_peft(described):
        raise ValueError(f"{os.fspath(checkpoint_id)}: it has PEFT adapters, and not their base: use export_adapter")
    left_out = [*described.all_tied_weights_keys, *(described._keys_to_ignore_on_save or ())]
    chosen: dict[str, Any] = {"include": [f"{_MODEL}*"], "exclude": [f"{_MODEL}{name}" for name in left_out]}
    chosen |= {"rename_regex": [(f"^{re.escape(_MODEL)}", "")], "dtype": dtype}
    options = WriteOptions(max_file_bytes=max_file_bytes, overwrite=overwrite)
    convert(checkpoint_id, os.fspath(folder), format="safetensors", options=options, **chosen)
    described.config.architectures = [type(described).__name__]
    described.config.dtype = dtype or described.config.dtype or described.dtype
    for part in (described.config, described.can_generate() and described.generation_config, processing_class):
        if part:
            part.save_pretrained(folder)


def export_adapter(
    checkpoint_id: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    adapter: str = "default",
) -> None:
    """Write a checkpoint's PEFT adapter for `PeftModel.from_pretrained`: `adapter_model.safetensors`, configuration.

    PEFT itself chooses the tensors and names them. Its base model is built without memory for its values.

    Args:
        checkpoint_id: Path or URI of a checkpoint of a Trainer or `save_state`, of a PEFT model.
        folder: Directory to create or add to. PEFT adds a folder of the adapter's name, unless it is `default`.
        adapter: Name of the adapter.

    Raises:
        ValueError: The checkpoint has no such adapter, or transformers lacks the class of its base.
        DcpError: The checkpoint was not found or is damaged.

    Ranks: one; not collective.
    """
    described = _described(checkpoint_id)
    if adapter not in (adapters := getattr(described, "peft_config", {})):
        known = ", ".join(map(repr, adapters)) or "none"
        raise ValueError(f"{os.fspath(checkpoint_id)}: it has no adapter {adapter!r}; its adapters: {known}")
    values = load_keys("app.model", checkpoint_id=checkpoint_id, no_dist=True)["app"]["model"]
    described.load_state_dict(values, strict=False, assign=True)
    described.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)


def describe_model(model: Any) -> dict[str, str]:
    """Return a model's class and configuration, and those of PEFT adapters; empty unless a `PreTrainedModel`."""
    if is_peft(model):
        described = describe_model(model.get_base_model())
        if not described:
            return {}
        adapters = {name: config.to_dict() for name, config in model.peft_config.items()}
        said = json.loads(described[_DESCRIPTION]) | {"adapters": adapters}
        return {_DESCRIPTION: json.dumps(said, default=_plain)}
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    generation = model.generation_config.to_dict() if model.can_generate() else None
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    said = {"class": type(model).__name__, "config": config, "generation_config": generation}
    return {_DESCRIPTION: json.dumps(said)}


def is_peft(model: Any) -> bool:
    """Return whether a model is a `PeftModel`; does not import PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _described(checkpoint_id: str | os.PathLike[str]) -> Any:
    try:
        said = json.loads(load_keys(_DESCRIPTION, checkpoint_id=checkpoint_id, no_dist=True)[_DESCRIPTION])
    except KeyError:
        said = {"class": None}
    kind = getattr(transformers, str(said["class"]), None)
    if kind is None:
        text = f"the class of its model is {said['class']}, which transformers does not have: pass one as model=…"
        raise ValueError(f"{os.fspath(checkpoint_id)}: {text}")
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(said["config"]))
    if said["generation_config"]:
        model.generation_config = transformers.GenerationConfig.from_dict(said["generation_config"])
    return _with_adapters(model, said.get("adapters", {}))


def _with_adapters(model: Any, adapters: dict[str, dict[str, Any]]) -> Any:
    if not adapters:
        return model
    import peft  # noqa: PLC0415 - only for checkpoints of PEFT models

    for name, values in adapters.items():
        config = peft.get_peft_config(values)
        if is_peft(model):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    return model
