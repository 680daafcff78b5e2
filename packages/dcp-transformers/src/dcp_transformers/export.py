"""`export_model`: write a checkpoint's model as a directory for `from_pretrained` and the Hub."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
import transformers

from dcp_core import load_keys
from dcp_format import WriteOptions, convert

__all__ = ["describe_model", "export_model"]

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


def describe_model(model: Any) -> dict[str, str]:
    """Return a model's class and configuration; empty unless a `PreTrainedModel`."""
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    generation = model.generation_config.to_dict() if model.can_generate() else None
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    said = {"class": type(model).__name__, "config": config, "generation_config": generation}
    return {_DESCRIPTION: json.dumps(said)}


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
    return model
