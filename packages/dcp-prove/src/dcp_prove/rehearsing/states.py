"""The tensors of a job, from a known model, a TOML file, a checkpoint or a function."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

from dcp_base.imports import resolve
from dcp_base.schemes import scheme_of
from dcp_core.state_dict.flatten import flatten
from dcp_core.testing.rehearsal.job import Tensor
from dcp_io import StoreBackend, open_store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODELS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "llama-3-8b": (32, 4096, 14336),
        "llama-3-70b": (80, 8192, 28672),
        "llama-3-405b": (126, 16384, 53248),
    }
)
"""Model → its layers, width, and width of the feed-forward network."""
_VOCABULARY, _KEYS = 128_256, 1024
_PARTS = "model", "optimizer.exp_avg", "optimizer.exp_avg_sq"
_DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_KEYS_OF_A_TENSOR = {"shape", "dtype", "count"}


def read_tensors(state: str) -> list[Tensor]:
    """Return the tensors' names, shapes and dtypes.

    Raises:
        click.BadParameter: The text names no state, or the file or function describes no tensors.
        CheckpointNotFoundError: The path holds none.
    """
    if state in MODELS:
        return [(f"{part}.{name}", shape, "float32") for part in _PARTS for name, shape in _parameters(*MODELS[state])]
    if scheme_of(state) == "file":
        if state.endswith(".toml"):
            return _of_file(Path(state))
        module, _, attribute = state.partition(":")
        if attribute and not Path(state).exists():
            return _of_function(state)
        if not Path(module).exists():
            known = ", ".join(MODELS)
            raise click.BadParameter(
                f"{state!r} is neither a model ({known}), a .toml file, a checkpoint that exists, nor module:function"
            )
    return _of_checkpoint(state)


def _parameters(layers: int, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "tok_embeddings.weight", (_VOCABULARY, width)
    for layer in range(layers):
        for name, rows in (("wq", width), ("wk", _KEYS), ("wv", _KEYS), ("wo", width)):
            yield f"layers.{layer}.attention.{name}.weight", (rows, width)
        yield f"layers.{layer}.feed_forward.w1.weight", (hidden, width)
        yield f"layers.{layer}.feed_forward.w2.weight", (width, hidden)
        yield f"layers.{layer}.feed_forward.w3.weight", (hidden, width)
        yield f"layers.{layer}.attention_norm.weight", (width,)
        yield f"layers.{layer}.ffn_norm.weight", (width,)
    yield "norm.weight", (width,)
    yield "output.weight", (_VOCABULARY, width)


def _of_file(path: Path) -> list[Tensor]:
    try:
        tables: dict[str, Any] = tomllib.loads(path.read_text("utf-8")).get("tensors", {})
        found = [tensor for name, table in tables.items() for tensor in _of_table(name, table)]
    except FileNotFoundError as error:
        raise click.BadParameter(f"there is no file {path}") from error
    except (OSError, ValueError, AttributeError) as error:
        example = '"layer" = { shape = [4096, 4096], dtype = "bfloat16", count = 32 }'
        raise click.BadParameter(f"{path}: {error}; below [tensors], write lines like {example}") from error
    return _some(found, str(path))


def _of_table(name: str, table: Any) -> Iterator[Tensor]:
    if not isinstance(table, dict) or not {"shape"} <= table.keys() <= _KEYS_OF_A_TENSOR:
        raise ValueError(f"tensor {name!r} must have a shape, and may have a dtype and a count")
    shape, dtype, count = table["shape"], table.get("dtype", "float32"), table.get("count", 1)
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"tensor {name!r} has the shape {shape!r}, not a list of sizes")
    if dtype not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the dtype {dtype!r}, which PyTorch does not have")
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"tensor {name!r} has the count {count!r}, not a number above 0")
    for number in range(count):
        yield f"{name}.{number}" if count > 1 else name, tuple(shape), dtype


def _of_checkpoint(path: str) -> list[Tensor]:
    index = StoreBackend(open_store(path)).read_index()
    numbers = index.tensor_shape.tolist()
    shapes: Sequence[tuple[int, ...]] = [tuple(numbers[begin:end]) for begin, end in pairwise(index.shape_starts())]
    dtypes = [index.dtypes[number] for number in index.tensor_dtype.tolist()]
    return _some([*zip(index.tensor_names, shapes, dtypes, strict=True)], path)


def _of_function(state: str) -> list[Tensor]:
    function = resolve(state, "--state")
    if not callable(function):
        raise click.BadParameter(f"{state} is not a function that returns a state dict")
    made = function()
    if not isinstance(made, Mapping):
        raise click.BadParameter(f"{state} returns a {type(made).__name__}, not a state dict")
    values = {name: value for name, value in flatten(made).values.items() if isinstance(value, torch.Tensor)}
    found = [(name, tuple(value.shape), str(value.dtype).removeprefix("torch.")) for name, value in values.items()]
    return _some(found, state)


def _some(tensors: list[Tensor], state: str) -> list[Tensor]:
    if not tensors:
        raise click.BadParameter(f"{state} has no tensors")
    return tensors
