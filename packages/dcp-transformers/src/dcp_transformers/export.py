"""`export_model`: the model in a checkpoint, as a folder that `from_pretrained` and the Hub take."""

from __future__ import annotations

import os
import re
from typing import Any

import torch

from dcp_format import WriteOptions, convert
from dcp_transformers.description import read_description

__all__ = ["export_model"]

_MODEL = "app.model."


def export_model(
    checkpoint_id: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    model: Any = None,
    processing_class: Any = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write the model of a checkpoint in the form of the Hub: safetensors with their index, configurations, tokenizer.

    A few MiB of tensors are in memory at a time, and no model is built but on the meta device. Weights that the
    configuration ties to others are left out, as `save_pretrained` does; `from_pretrained` ties them again.

    Args:
        checkpoint_id: A checkpoint of a Trainer or of `save_state`, in a folder or at a URI.
        folder: To be made, or with files of other names in it.
        model: Any `PreTrainedModel` of that class and configuration; needed if its class is not one of transformers.
        processing_class: Tokenizer or processor, whose files are written as well.
        dtype: Of floating-point weights; None leaves them as they are.
        shard_bytes: Size that a file may have.
        overwrite: Whether a model in the folder may be replaced.

    Raises:
        ValueError: The checkpoint says nothing of a configuration, or names a class that transformers does not have.
        DcpError: Its subclasses say what: not found, damaged, exists already.

    Ranks: one; not collective.
    """
    described = read_description(checkpoint_id) if model is None else model
    left_out = [*described.all_tied_weights_keys, *(described._keys_to_ignore_on_save or ())]
    convert(
        checkpoint_id,
        os.fspath(folder),
        format="safetensors",
        include=[f"{_MODEL}*"],
        exclude=[f"{_MODEL}{name}" for name in left_out],
        rename_regex=[(f"^{re.escape(_MODEL)}", "")],
        dtype=dtype,
        options=WriteOptions(shard_bytes=shard_bytes, overwrite=overwrite),
    )
    if dtype is not None:
        described.config.dtype = dtype
    described.config.architectures = [type(described).__name__]
    for part in (described.config, described.generation_config if described.can_generate() else None, processing_class):
        if part is not None:
            part.save_pretrained(folder)

