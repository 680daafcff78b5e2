"""`dcp convert`: convert any format into any other, tensor by tensor."""

from __future__ import annotations

import contextlib
import functools
import importlib
from dataclasses import asdict
from typing import Any

import click

from dcp_inspect.arguments import PLACE, is_uri, parse_size
from dcp_inspect.contents import OtherFormatError, folder_of, open_index
from dcp_inspect.examples import examples
from dcp_inspect.printing.output import count_bytes, json_option, print_json, print_line
from dcp_inspect.reading.values import check_exists, formats
from dcp_manifest import CheckpointNotFoundError, CorruptCheckpointError, UnsupportedFormatError


@click.command(
    "convert",
    epilog=examples(
        "dcp convert runs/step-100 weights.pt",
        "dcp convert model.pt new-checkpoint",
        "dcp convert runs/step-100 s3://bucket/copy",
        "dcp convert runs/step-100 out.safetensors --include 'model.*' --rename model.= --dtype bfloat16",
        "dcp convert runs/step-100 export.hf --objects sidecar --shard-size 2GB",
    ),
)
@click.argument("source", type=PLACE)
@click.argument("destination", type=PLACE)
@click.option("--to", "to", help="Format to write: checkpoint, torch, safetensors; default: by the destination's name.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Names to take (repeatable); all without it.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Names to leave out (repeatable).")
@click.option("--rename", multiple=True, metavar="OLD=NEW",
              help="Another name for a value or a path; PREFIX= drops a prefix, =PREFIX adds one (repeatable).",
              )  # fmt: skip
@click.option("--rename-regex", multiple=True, nargs=2, metavar="PATTERN NEW", help="As re.sub, for other names.")
@click.option("--dtype", help="Of floating-point tensors in the result, e.g. bfloat16.")
@click.option("--shard-size", default="5GB", show_default=True, help="Size of a file of a safetensors directory.")
@click.option("--objects", type=click.Choice(["refuse", "sidecar", "skip"]), default="refuse", show_default=True,
              help="Policy for values that are not tensors, where a format holds tensors only.")  # fmt: skip
@click.option("--layout", type=click.Choice(["torch", "raw"]), default="torch", show_default=True,
              help="Of a checkpoint's data files.")  # fmt: skip
@click.option("--compression", help="Of a checkpoint's data: auto, planes, zstd, none, or the name of a transform.")
@click.option("--overwrite", is_flag=True, help="Replace what is at the destination.")
@json_option
def command(source: str, destination: str, as_json: bool, **given: Any) -> int:
    """Convert SOURCE to DESTINATION. The source's format is detected from its content.

    The destination's name selects the format: `.pt`, `.pth`, `.bin` a torch.save file, `.safetensors` a file, `.hf` a
    Hugging Face directory, anything else a checkpoint's directory; --to says otherwise. Both may be URIs, such as
    s3://bucket/run/step-100; only checkpoints are written to a URI.
    """
    check_exists(source)
    source = folder_of(source)
    package = formats("converting")
    _check_source(package, source)
    _check(package, given)
    convert = functools.partial(
        package.convert,
        source,
        destination,
        format=given["to"],
        include=given["include"],
        exclude=given["exclude"],
        rename=dict(map(_pair, given["rename"])),
        rename_regex=given["rename_regex"],
        dtype=_dtype(given["dtype"]),
        options=package.WriteOptions(
            overwrite=given["overwrite"],
            max_file_bytes=parse_size(given["shard_size"]),
            objects=given["objects"],
            layout=given["layout"],
            compression=given["compression"],
        ),
    )
    try:
        done = convert()
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        error.name_place(source)
        raise
    if as_json:
        print_json({**asdict(done), "source": source, "destination": destination})
    else:
        tensors = f"{done.tensors} tensor{'s' if done.tensors != 1 else ''}"
        print_line(f"{destination}: {tensors}, {count_bytes(done.bytes)}, {done.format}")
    return 0


def _check_source(package: Any, source: str) -> None:
    if is_uri(source):
        return
    try:
        package.detect(source)
    except UnsupportedFormatError:
        with contextlib.suppress(OtherFormatError):
            open_index(source)
        raise


def _pair(text: str) -> tuple[str, str]:
    """Split OLD=NEW; an empty side is the top of all names."""
    old, separator, new = text.partition("=")
    old, new = old.removesuffix("."), new.removesuffix(".")
    if not separator or old == new:
        raise click.BadParameter(f"--rename {text!r} must be OLD=NEW, or PREFIX= to drop a prefix")
    return old, new


def _check(package: Any, given: dict[str, Any]) -> None:
    try:
        importlib.import_module("dcp_core.state_dict.flatten").KeyMap({}, given["rename_regex"])
        importlib.import_module("dcp_core.encoding.compression").CompressionPolicy(given["compression"])
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if given["to"] is not None:
        try:
            package.converter_for(given["to"])
        except LookupError as error:
            known = ", ".join(importlib.import_module("dcp_core").plugins.names("converters"))
            raise click.BadParameter(f"--to {given['to']!r} is no installed format; choose one of {known}") from error


def _dtype(name: str | None) -> Any:
    if name is None:
        return None
    torch = importlib.import_module("torch")
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise click.BadParameter(f"--dtype {name!r} is no floating-point dtype of torch, such as float32 or bfloat16")
    return found
