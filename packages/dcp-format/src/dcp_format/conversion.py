"""`convert`: conversion between checkpoint formats in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from dcp_base.escaping import printable, printable_bytes
from dcp_base.progress import Progress, report_operation
from dcp_base.schemes import WEB_SCHEMES, file_path, scheme_of
from dcp_core.errors import UnsupportedFormatError
from dcp_format.content.changes import cast_tensors, rename_values, select_values
from dcp_format.content.content import Content, WriteOptions
from dcp_format.converters import converter_for, detect, detect_at_uri, format_of_name, takes_uris
from dcp_format.fetched_files import Fetched
from dcp_io import open_store


@dataclass(frozen=True, slots=True, repr=False)
class Conversion:
    """Report of a conversion. Its `repr` is a short text for notebooks."""

    source: str
    """Path or URI that was read."""
    destination: str
    """Path or URI that was written."""
    format: str
    """Name of the format that was written: `checkpoint`, `torch`, `safetensors`, or a plug-in's format."""
    tensors: int
    """Number of tensors; every name of a tied tensor counts."""
    objects: int
    """Number of other values that were selected, written or not (see `WriteOptions.objects`)."""
    bytes: int
    """Size in bytes of the tensors' elements; tied tensors count once."""

    def __repr__(self) -> str:
        count = f"{self.tensors:,} tensor{'' if self.tensors == 1 else 's'}"
        return f"<Conversion: {printable(self.destination)}: {count}, {printable_bytes(self.bytes)}, {self.format}>"


def open_content(path: str | os.PathLike[str]) -> Content:
    """Open a checkpoint or file of any format as a `Content`, which the caller closes.

    Files of formats other than checkpoints are downloaded from a URI into a temporary folder, until `Content.close`.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`.
        UnsupportedFormatError: No installed converter recognises the format.
    """
    if scheme_of(path) == "file":
        place = file_path(path)
        return converter_for(detect(place)).read(place)
    uri = os.fspath(path)
    name = detect_at_uri(uri)
    if name is not None and takes_uris(converter_for(name)):
        return converter_for(name).read(uri)
    copy = Fetched(uri)
    try:
        content = converter_for(name or detect(copy.path)).read(copy.path)
    except BaseException:
        copy.close()
        raise
    return replace(content, url=uri, close=partial(_close, content, copy))


def _close(content: Content, copy: Fetched) -> None:
    content.close()
    copy.close()


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - what users call it
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Mapping[str, str] | None = None,
    rename_regex: Sequence[tuple[str, str]] = (),
    dtype: torch.dtype | None = None,
    options: WriteOptions | None = None,
) -> Conversion:
    """Convert a checkpoint or file to another format, tensor by tensor; an error leaves the destination unchanged.

    Args:
        source: File, folder or URI to read.
        destination: File or folder to write. A checkpoint may be written to a URI that an installed storage opens.
        format: Name of the format to write: `checkpoint`, `torch`, `safetensors`, or a plug-in's format; None selects
            it by the name of the destination.
        include: Shell patterns of the names to convert; empty for all names.
        exclude: Shell patterns of the names to leave out.
        rename: Name in the source → name in the result. A renamed value leaves its nested dict or list.
        rename_regex: Pairs (regular expression, replacement) for names that `rename` lacks.
        dtype: Dtype of floating-point tensors in the result; None keeps their dtypes.
        options: Options for writing.

    Raises:
        DcpError: The conversion failed; the subclass gives the reason: not found, damaged, unsafe, unsupported.
        PluginNotFoundError: No installed package opens a URI; the message names the package to install.
        InvalidPlaceError: The source or destination is empty, or a URI that has lost a slash.

    Ranks: one; not collective.

    Example:
        ```python
        import torch
        from dcp_format import convert

        torch.save({"weight": torch.ones(3), "bias": torch.zeros(3)}, "model.pt")
        done = convert("model.pt", "model.safetensors", exclude=["bias"], dtype=torch.bfloat16)
        assert (done.format, done.tensors) == ("safetensors", 1)
        print(done)  # <Conversion: model.safetensors: 1 tensor, 6 B, safetensors>
        ```
    """
    source, destination = _local_or_uri(source), _local_or_uri(destination)
    name = format or format_of_name(destination)
    writer = converter_for(name)
    if scheme_of(destination) != "file":
        _check_target(destination, name)
    if _spelled(source) == _spelled(destination):
        raise UnsupportedFormatError(f"{os.fspath(source)} cannot be converted into itself: choose another destination")
    content = open_content(source)
    try:
        changed = rename_values(select_values(content, include, exclude), rename, rename_regex)
        if dtype is not None:
            changed = cast_tensors(changed, dtype)
        with report_operation("convert", destination) as progress:
            progress.expect(changed.nbytes)
            changed = writer.write(changed, destination, _reporting(options or WriteOptions(), progress)) or changed
        tensors = len(changed.tensors) + len(changed.aliases)
        return Conversion(source, destination, name, tensors, len(changed.objects), changed.nbytes)
    finally:
        content.close()


def _reporting(options: WriteOptions, progress: Progress) -> WriteOptions:
    def tick(count: int) -> None:
        progress(count)
        options.tick(count)

    return replace(options, tick=tick)


def _local_or_uri(place: str | os.PathLike[str]) -> str:
    return file_path(place) if scheme_of(place) == "file" else os.fspath(place)


def _spelled(place: str) -> str:
    return os.path.abspath(place) if scheme_of(place) == "file" else place.rstrip("/")


def _check_target(uri: str, name: str) -> None:
    scheme = scheme_of(uri)
    if not takes_uris(converter_for(name)):
        raise UnsupportedFormatError(
            f"{uri}: the format {name!r} is written to files of this machine only, since a storage would show a part "
            "of one; write the file here and copy it, or write a checkpoint (format='checkpoint', `--to checkpoint`)"
        )
    if scheme in WEB_SCHEMES:
        raise UnsupportedFormatError(f"{uri}: a web server takes no files; write to another place")
    open_store(uri)
