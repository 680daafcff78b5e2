"""Description of a transformers model as one text, saved beside its weights so that they can be exported later."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import transformers

from dcp_core import load_keys

__all__ = ["describe_model", "read_description"]

_KEY = "description"


def describe_model(model: Any) -> dict[str, str]:
    """Return what to save: class, configurations; nothing for a model without one. Wrappers must have been removed."""
    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    texts = {"class": type(model).__name__, "config": model.config.to_dict()}
    if model.can_generate():
        texts["generation_config"] = model.generation_config.to_dict()
    return {_KEY: json.dumps(texts)}


def read_description(checkpoint_id: str | os.PathLike[str]) -> Any:
    """Return a model without memory, on the meta device, of the saved class and configuration.

    Raises:
        ValueError: Nothing was said of it, or transformers has no such class.
    """
    try:
        said = json.loads(load_keys(_KEY, checkpoint_id=checkpoint_id, no_dist=True)[_KEY])
    except KeyError:
        said = {"class": None}
    kind = getattr(transformers, str(said["class"]), None)
    if kind is None:
        raise ValueError(
            f"{os.fspath(checkpoint_id)} names {said['class']!r} as the class of its model, and transformers has no such "
            "class; pass a model of it: export_model(…, model=…)"
        )
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(said["config"]))
    if "generation_config" in said:
        model.generation_config = transformers.GenerationConfig.from_dict(said["generation_config"])
    return model
