"""Exports of a checkpoint's model for `from_pretrained` and the Hub, and of its adapters for PEFT.

Every `dcp convert` imports this module for the format `peft`, so transformers is imported in functions.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dcp_core import load_keys
from dcp_core.errors import UnsupportedFormatError
from dcp_core.objects.object_bytes import load_object
from dcp_format import Content, TensorEntry, WriteOptions, convert
from dcp_io import CheckpointExistsError, LocalStore
from dcp_io.requests import whole_bytes

_MODEL, _DESCRIPTION = "app.model.", "description"
_SUFFIX = ".safetensors"
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
        ValueError: The checkpoint lacks the adapter, or frozen values of it; or transformers lacks the class of its
            base.
        DcpError: The checkpoint was not found or is damaged.

    Ranks: one; not collective.
    """
    described = _described(checkpoint_id)
    where = os.fspath(checkpoint_id)
    values = load_keys("app.model", checkpoint_id=checkpoint_id, no_dist=True)["app"]["model"]
    _load_adapters(described, values, where, only=adapter)
    described.save_pretrained(folder, selected_adapters=[adapter], save_embedding_layers=False)


def describe_model(model: Any) -> dict[str, str]:
    """Return a model's class and configuration, and those of PEFT adapters; empty unless a `PreTrainedModel`.

    A loop of your own saves it for exports: `{"app": app_state(model, optimizer), **describe_model(model)}`.
    """
    if is_peft(model):
        described = describe_model(model.get_base_model())
        if not described:
            return {}
        adapters = {name: config.to_dict() for name, config in model.peft_config.items()}
        said = json.loads(described[_DESCRIPTION]) | {"adapters": adapters}
        return {_DESCRIPTION: json.dumps(said, default=_plain)}
    import transformers  # noqa: PLC0415 - see above

    if not isinstance(model, transformers.PreTrainedModel):
        return {}
    generation = model.generation_config.to_dict() if model.can_generate() else None
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    said = {"class": type(model).__name__, "config": config, "generation_config": generation}
    return {_DESCRIPTION: json.dumps(said)}


def _load_adapters(model: Any, values: dict[str, Any], where: str, *, only: str | None = None) -> list[str]:
    if not is_peft(model):
        raise ValueError(
            f"{where}: its model has no PEFT adapter; use export_model, or `dcp convert` without --to peft"
        )
    missing = model.load_state_dict(values, strict=False, assign=True).missing_keys
    lacks = {adapter: [name for name in missing if adapter in name.split(".")] for adapter in model.peft_config}
    if only is not None and only not in lacks:
        raise ValueError(f"{where}: it has no adapter {only!r}; its adapters: {', '.join(map(repr, lacks))}")
    whole = [adapter for adapter, names in lacks.items() if not names]
    if not whole or (only is not None and lacks[only]):
        name = only if only is not None else next(iter(lacks))
        raise ValueError(
            f"{where}: it lacks values of the adapter {name!r}, such as {lacks[name][0]!r}, which were frozen when it "
            "was saved. Load it into the model, and call the model's save_pretrained"
        )
    return whole


def is_peft(model: Any) -> bool:
    """Return whether a model is a `PeftModel`; does not import PEFT."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _described(checkpoint_id: str | os.PathLike[str]) -> Any:
    try:
        text = load_keys(_DESCRIPTION, checkpoint_id=checkpoint_id, no_dist=True)[_DESCRIPTION]
    except KeyError:
        text = json.dumps({"class": None})
    return _described_model(text, os.fspath(checkpoint_id))


def _described_model(description: Any, where: str) -> Any:
    """Return a model like the described one, on the meta device, with its adapters."""
    import transformers  # noqa: PLC0415 - see above

    try:
        said = json.loads(description)
        kind = getattr(transformers, str(said["class"]), None)
        if kind is not None:
            with torch.device("meta"):
                model = kind(kind.config_class.from_dict(said["config"]))
            if said["generation_config"]:
                model.generation_config = transformers.GenerationConfig.from_dict(said["generation_config"])
            return _with_adapters(model, said.get("adapters", {}))
    except ImportError:
        raise
    except Exception as error:  # constructors of transformers and PEFT raise errors of all kinds
        text = f"its entry {_DESCRIPTION!r} describes no model ({type(error).__name__}: {error}): describe_model did "
        text += "not write it, it is damaged, or other versions of transformers and PEFT are needed"
        raise UnsupportedFormatError(f"{where}: {text}") from error
    text = f"the class of its model is {said['class']}, which transformers does not have: pass one as model=…"
    raise ValueError(f"{where}: {text}")


def _with_adapters(model: Any, adapters: dict[str, dict[str, Any]]) -> Any:
    if not adapters:
        return model
    import peft  # noqa: PLC0415 - only for checkpoints of PEFT models

    for name, values in adapters.items():
        if "/" in name:  # PEFT would write to a directory of this name
            raise ValueError(f"the name of the adapter {name!r} is a path: PEFT would write its files there")
        config = peft.get_peft_config(values)
        if is_peft(model):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    return model


class PeftConverter:
    """Converter that writes the adapters of a checkpoint that describes its model, except frozen ones."""

    def detect(self, path: str | os.PathLike[str]) -> bool:
        """Return False: adapters are read as safetensors."""
        del path
        return False

    def suits(self, path: str | os.PathLike[str]) -> bool:
        """Return False."""
        del path
        return False

    def read(self, path: str | os.PathLike[str]) -> Content:
        """Raise UnsupportedFormatError."""
        raise UnsupportedFormatError(f"{os.fspath(path)}: the format 'peft' is only written; read 'safetensors'")

    def write(self, content: Content, path: str | os.PathLike[str], options: WriteOptions) -> Content:
        """Write each file atomically, configurations last; return the values that were used."""
        try:
            import peft  # noqa: F401, PLC0415 - see above
            import transformers  # noqa: F401, PLC0415 - see above
        except ImportError as error:
            raise UnsupportedFormatError(
                f"to write the format 'peft', install transformers and peft: {error}"
            ) from error
        used = _select(content)
        model = _described_model(load_object(used.objects[_DESCRIPTION](), key=_DESCRIPTION), content.url)
        tensors = {name.removeprefix(_MODEL): _read(entry) for name, entry in used.tensors.items()}
        names = _load_adapters(model, tensors, content.url)
        with tempfile.TemporaryDirectory() as made:
            model.save_pretrained(made, selected_adapters=names, save_embedding_layers=False)
            files = [file for file in Path(made).rglob("*") if file.suffix in (_SUFFIX, ".json")]
            places = {file: Path(path) / file.relative_to(made) for file in files}
            existing = [place for place in places.values() if place.exists()]
            if existing and not options.overwrite:
                raise CheckpointExistsError(
                    f"{existing[0]} exists already; choose another place, or allow overwriting it"
                )
            for file in sorted(files, key=lambda file: file.suffix != _SUFFIX):
                store = LocalStore(places[file].parent)
                store.make()
                store.publish(file.name, file.read_bytes())
        options.tick(content.nbytes)
        return used


def _select(content: Content) -> Content:
    if _DESCRIPTION not in content.objects:
        raise UnsupportedFormatError(
            f"{content.url} does not describe its model. Checkpoints of `manage_checkpoints` and `save_state` do, and "
            "those of a state with `**dcp_transformers.describe_model(model)`"
        )
    tensors = {name: entry for name, entry in content.tensors.items() if name.startswith(_MODEL)}
    objects = {_DESCRIPTION: content.objects[_DESCRIPTION]}
    aliases = {alias: name for alias, name in content.aliases.items() if name in tensors}
    return replace(content, tensors=tensors, objects=objects, aliases=aliases)


def _read(entry: TensorEntry) -> torch.Tensor:
    data = whole_bytes(entry.data)
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(getattr(torch, entry.dtype)).reshape(entry.shape)
