"""`dcp cat`: print one tensor, a slice of it, or an object. Reads only the requested rows."""

from __future__ import annotations

import importlib
import re
from typing import Any

import click

from dcp_inspect.errors import MissingValueError
from dcp_inspect.places import PLACE
from dcp_inspect.printing.output import json_option, print_json, say
from dcp_inspect.printing.suggestions import near
from dcp_inspect.values import open_values, tensor_of, tensor_rows
from dcp_manifest import DcpError

__all__ = ["command", "parse_key"]

_SLICED = re.compile(r"(?P<name>.*)\[(?P<slices>[\d:,.\s+-]*)\]$", re.DOTALL)
Slices = tuple[Any, ...]


@click.command("cat")
@click.argument("path", type=PLACE)
@click.argument("key")
@json_option
def command(path: str, key: str, as_json: bool) -> int:
    """Print the values of KEY in a checkpoint or file; 'KEY[0:3, ..., -1]' prints a part, sliced as in Python."""
    content = open_values(path)
    try:
        name, slices = parse_key(key, {*content.tensors, *content.objects, *content.aliases})
        name = content.aliases.get(name, name)
        if name in content.objects:
            value = _object(content, name)
            if as_json:
                print_json({"name": name, "value": repr(value)})
            else:
                say(repr(value), lines=True)
            return 0
        if name not in content.tensors:
            found = near(name, [*content.tensors, *content.objects])
            hint = f"; near it: {', '.join(found)}" if found else ""
            raise MissingValueError(f"{path} holds no value {name!r}{hint}; `dcp show {path}` lists the names")
        tensor = _part(content.tensors[name], slices)
    finally:
        content.close()
    if as_json:
        values = tensor.to(importlib.import_module("torch").float64) if tensor.is_floating_point() else tensor
        text = values.tolist() if not tensor.is_complex() else [str(each) for each in tensor.flatten().tolist()]
        dtype = str(tensor.dtype).removeprefix("torch.")
        print_json({"name": name, "dtype": dtype, "shape": list(tensor.shape), "values": text})
    else:
        say(f"{name}: {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}")
        say(str(tensor).removeprefix("tensor"), lines=True)
    return 0


def parse_key(key: str, names: set[str]) -> tuple[str, Slices]:
    """Split a key into the name and the slices; a name may itself end in brackets.

    Raises:
        UsageError: The text in the brackets is not a slice.
    """
    found = _SLICED.match(key)
    if key in names or found is None:
        return key, ()
    return found["name"], tuple(map(_slice, found["slices"].split(","))) if found["slices"].strip() else ()


def _slice(text: str) -> Any:
    text = text.strip()
    if text == "...":
        return ...
    try:
        if ":" not in text:
            return int(text)
        parts = [int(part) if part.strip() else None for part in text.split(":")]
        return slice(*parts)
    except (ValueError, TypeError):
        raise click.UsageError(f"{text!r} is no index or slice; write them as in Python, like [0:3, ..., -1]") from None


def _object(content: Any, name: str) -> Any:
    objects = importlib.import_module("dcp_core.objects.object_bytes")
    return objects.load_object(content.objects[name](), key=name)


def _rows(entry: Any, slices: Slices) -> Any:
    """Return the requested part if its first index or slice selects rows."""
    first: Any = slices[0]
    rest = slices[1:]
    rows = range(entry.shape[0])
    if isinstance(first, int):
        row = rows[first]
        return tensor_rows(entry, row, row + 1)[0][rest] if rest else tensor_rows(entry, row, row + 1)[0]
    wanted: range = rows[first]
    if wanted.step < 0:
        raise ValueError("steps must be positive")
    inside = (slice(None, None, wanted.step), *rest)
    if not wanted:
        return tensor_rows(entry, 0, 0)[inside]
    return tensor_rows(entry, wanted[0], wanted[-1] + 1)[inside]


def _part(entry: Any, slices: Slices) -> Any:
    """Return the requested part of a tensor; reads no more rows than needed."""
    shape = entry.shape
    try:
        if slices and slices[0] is not ... and shape:
            return _rows(entry, slices)
        return tensor_of(entry)[slices] if slices else tensor_of(entry)
    except DcpError:  # damage is no wrong use
        raise
    except (IndexError, ValueError) as error:
        raise click.UsageError(f"{entry.name!r} has shape {tuple(shape)}: {error}") from error
