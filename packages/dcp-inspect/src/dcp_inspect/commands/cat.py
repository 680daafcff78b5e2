"""`dcp cat`: print one tensor, a slice of it, or an object."""

from __future__ import annotations

import json
import re
from typing import Any

import click
import numpy as np

from dcp_base import DcpError
from dcp_inspect.arguments import PLACE
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import console, json_option, print_json, say
from dcp_inspect.printing.suggestions import hint
from dcp_inspect.reading.values import array_rows, load_value, open_values, whole_array
from dcp_manifest import CheckpointNotFoundError

_SLICED = re.compile(r"(?P<name>.*)\[(?P<slices>[\d:,.\s+-]*)\]$", re.DOTALL)
Slices = tuple[Any, ...]


@click.command(
    "cat",
    epilog=examples(
        "dcp cat runs/step-100 step",
        "dcp cat runs/step-100 'model.weight[0:2, -1]'",
        "dcp cat runs/step-100 step --json",
    ),
)
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
            if slices:
                raise click.UsageError(f"{name!r} is no tensor, and has no parts to print")
            value = load_value(content.objects[name](), name)
            if as_json:
                print_json({"name": name, "type": type(value).__name__, "value": json_value(value)})
            else:
                say(repr(value), lines=True)
            return 0
        if name not in content.tensors:
            meant = hint(path, name, [*content.tensors, *content.objects])
            raise CheckpointNotFoundError(f"{path} holds no value {name!r}{meant}; `dcp show {path}` lists the names")
        entry = content.tensors[name]
        array = _part(entry, slices)
    finally:
        content.close()
    if as_json:
        values = array.tolist() if array.dtype.kind != "c" else [str(each) for each in array.ravel().tolist()]
        print_json({"name": name, "dtype": entry.dtype, "shape": [*array.shape], "values": values})
    else:
        say(f"{name}: {entry.dtype} {array.shape}")
        say(np.array2string(array, separator=", ", max_line_width=console().width), lines=True)
    return 0


def json_value(value: Any) -> Any:
    """Return a value of JSON unchanged, any other as text."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        return repr(value)
    return value if same or value != value else repr(value)  # noqa: PLR0124 - NaN is printed as JSON allows


def parse_key(key: str, names: set[str]) -> tuple[str, Slices]:
    """Split a key into name and slices; a name may itself end in brackets."""
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


def _rows(entry: Any, slices: Slices) -> Any:
    first: Any = slices[0]
    rest = slices[1:]
    rows = range(entry.shape[0])
    if isinstance(first, int):
        row = rows[first]
        index = (0, *rest)
        return array_rows(entry, row, row + 1)[index]
    wanted: range = rows[first]
    if wanted.step < 0:
        raise ValueError("steps must be positive")
    inside = (slice(None, None, wanted.step), *rest)
    if not wanted:
        return array_rows(entry, 0, 0)[inside]
    return array_rows(entry, wanted[0], wanted[-1] + 1)[inside]


def _part(entry: Any, slices: Slices) -> Any:
    shape = entry.shape
    try:
        if slices and slices[0] is not ... and shape:
            return _rows(entry, slices)
        return whole_array(entry)[slices]
    except DcpError:  # damage is not wrong use
        raise
    except (IndexError, ValueError) as error:
        raise click.UsageError(f"{entry.name!r} has shape {tuple(shape)}: {error}") from error
