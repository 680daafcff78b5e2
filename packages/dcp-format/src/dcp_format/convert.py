"""`convert`: any format into any other, in bounded memory, with other names, dtypes or file sizes on the way."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch

from dcp_core.errors import UnsupportedFormatError
from dcp_format.changes import cast_tensors, rename_values, select_values
from dcp_format.content import Content
from dcp_format.converters import WriteOptions, converter_for, detect, format_of_name

__all__ = ["convert", "open_content"]


def open_content(path: str | os.PathLike[str], *, format: str | None = None) -> Content:  # noqa: A002 - what users call it
    """What is at `path`, in whichever format; close it when it is done with.

    Raises:
        CheckpointNotFoundError: There is nothing.
        UnsupportedFormatError: No installed converter knows it.
        CorruptCheckpointError: It is damaged.
    """
    return converter_for(format or detect(path)).read(path)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    source_format: str | None = None,
    format: str | None = None,  # noqa: A002 - what users call it
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    rename_regex: Sequence[tuple[str, str]] = (),
    dtype: torch.dtype | None = None,
    options: WriteOptions | None = None,
    started: Callable[[Content], None] = lambda _: None,
) -> str:
    """Write what is at `source` to `destination`, tensor by tensor; an error leaves the destination as it was.

    Args:
        source: File or folder; its format is found from its content.
        destination: File or folder; the format follows from its name, or from `format`.
        source_format: Name of the source's format, if it should not be looked for.
        format: Name of the format to write: `checkpoint`, `torch`, `safetensors`, or one of a plugin.
        include: Shell patterns of names to take; all if empty.
        exclude: Shell patterns of names to leave out.
        rename: Name (or path) in the source → name in the result.
        rename_regex: (regular expression, replacement) pairs for other names.
        dtype: Of floating-point tensors in the result; None leaves them as they are.
        options: How to write.
        started: Is given the content that will be written, before it is.

    Returns:
        The name of the format that was written.

    Raises:
        DcpError: Its subclasses say what: not found, damaged, unsafe, cannot be held by the format.

    Ranks: one; not collective.
    """
    name = format or format_of_name(destination)
    writer = converter_for(name)
    if os.path.abspath(source) == os.path.abspath(destination):
        raise UnsupportedFormatError(f"{os.fspath(source)} cannot be converted into itself: choose another destination")
    content = open_content(source, format=source_format)
    try:
        changed = rename_values(select_values(content, include, exclude), rename, rename_regex)
        if dtype is not None:
            changed = cast_tensors(changed, dtype)
        started(changed)
        writer.write(changed, destination, options or WriteOptions())
    finally:
        content.close()
    return name
