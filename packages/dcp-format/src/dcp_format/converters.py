"""Contract of a format's converter (hook `dcp_register_converters`), and look-up by format name or file content."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

from dcp_base.escaping import printable
from dcp_base.logs import library_logger
from dcp_base.schemes import file_path, scheme_of
from dcp_core import plugins
from dcp_core.errors import CheckpointNotFoundError, UnsupportedFormatError
from dcp_format.checkpoints.checkpoint import is_checkpoint, open_checkpoint, stored_content, write_checkpoint
from dcp_format.content.content import Content, WriteOptions
from dcp_format.fetched_files import Fetched
from dcp_format.safetensors.complete_set import SUFFIX
from dcp_format.safetensors.safetensors_index import INDEX_NAME, open_safetensors
from dcp_format.safetensors.safetensors_write import write_safetensors
from dcp_format.torch_save.torch_save_read import is_torch_weights, open_torch_weights
from dcp_format.torch_save.torch_save_write import write_torch_save

_logger = library_logger(__name__)


class Converter(Protocol):
    """Converter of one format: detects, reads and writes files of this format.

    Methods get local paths. If a converter has a true attribute `takes_uris`, they also get URIs of installed storages;
    for other converters, the files at a URI are downloaded first.
    """

    def detect(self, path: str | os.PathLike[str]) -> bool:
        """Whether the file or folder at `path` has this format, by its content. Raises no error for other formats."""
        ...

    def suits(self, path: str | os.PathLike[str]) -> bool:
        """Whether the name of a new file or folder selects this format, such as by its suffix.

        If several converters return True, a converter without a true attribute `fallback` is preferred.
        """
        ...

    def read(self, path: str | os.PathLike[str]) -> Content:
        """Read a file or folder as a `Content`; its tensors are read on demand."""
        ...

    def write(self, content: Content, path: str | os.PathLike[str], options: WriteOptions) -> Content | None:
        """Write a `Content` to a file or folder, atomically. Return the values of a format that takes only some."""
        ...


def converter_for(name: str) -> Converter:
    """Return the converter of a format. Raises PluginNotFoundError if no installed package has it."""
    made = plugins.converter(name)
    found: Converter = made() if isinstance(made, type) else made
    return found


def detect(path: str | os.PathLike[str]) -> str:
    """Return the name of the format at a path or URI; the files at a URI may be downloaded to detect it.

    Raises CheckpointNotFoundError or UnsupportedFormatError.
    """
    if scheme_of(path) == "file":
        return _detect_file(file_path(path))
    name = detect_at_uri(os.fspath(path))
    if name is not None:
        return name
    with contextlib.closing(Fetched(os.fspath(path))) as copy:
        return _detect_file(copy.path)


def detect_at_uri(uri: str) -> str | None:
    """Return the format at a URI, if a converter that reads URIs recognises it; None otherwise."""
    names = [name for name in plugins.names("converters") if takes_uris(converter_for(name))]
    return next((name for name in names if converter_for(name).detect(uri)), None)


def takes_uris(converter: Converter) -> bool:
    """Whether a converter reads and writes URIs directly."""
    return bool(getattr(converter, "takes_uris", False))


def _detect_file(path: str | os.PathLike[str]) -> str:
    if not Path(path).exists():
        raise CheckpointNotFoundError(f"there is nothing at {os.fspath(path)}: check the path")
    if not Path(path).is_file() and not Path(path).is_dir():
        # A converter that opened a pipe would wait for a writer.
        raise UnsupportedFormatError(f"{os.fspath(path)} is neither a file nor a directory: check the path")
    if Path(path).is_file() and not Path(path).stat().st_size:
        raise UnsupportedFormatError(f"{os.fspath(path)} is empty: a write to it may not have finished")
    names = plugins.names("converters")
    failure: Exception | None = None
    for name in names:
        try:
            if converter_for(name).detect(path):
                return name
        except Exception as error:  # noqa: BLE001 - one broken plugin must not hide the others
            _logger.warning("the converter %r could not look at %s: %r", name, printable(os.fspath(path)), error)
            failure = failure or error
    raise UnsupportedFormatError(
        f"{os.fspath(path)} is of no known format ({', '.join(names) or 'none installed'}): it is no checkpoint "
        "directory, safetensors or torch.save file"
    ) from failure


def format_of_name(path: str | os.PathLike[str]) -> str:
    """Return the format that a new name selects. Raises UnsupportedFormatError if none or several match."""
    suited = {name: made for name in plugins.names("converters") if (made := converter_for(name)).suits(path)}
    if len(suited) > 1:
        suited = {name: made for name, made in suited.items() if not getattr(made, "fallback", False)}
    if len(suited) == 1:
        return next(iter(suited))
    raise UnsupportedFormatError(
        f"the name {os.fspath(path)} does not determine the format to write: choose one with format= "
        f"({', '.join(plugins.names('converters'))})"
    )


Place = str | os.PathLike[str]
_INDEX_SUFFIX = f"{SUFFIX}.index.json"
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


class CheckpointConverter:
    """Converter of checkpoint folders, which have an index `.metadata`."""

    fallback = True
    """Names that no other converter selects are checkpoints."""
    takes_uris = True
    """Checkpoints at URIs are written in place, since every store publishes an index atomically."""

    detect, read, write = staticmethod(is_checkpoint), staticmethod(open_checkpoint), staticmethod(write_checkpoint)

    def suits(self, path: Place) -> bool:
        """Whether the name lacks the suffix of another format."""
        return Path(path).suffix not in (*_TORCH_SUFFIXES, SUFFIX) and not str(path).endswith((".hf", ".hf/"))


class TorchSaveConverter:
    """Converter of `torch.save` files, and of folders of `pytorch_model-*.bin` files."""

    detect, read = staticmethod(is_torch_weights), staticmethod(open_torch_weights)
    write = staticmethod(write_torch_save)

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.pt`, `.pth`, `.bin` or `.ckpt`."""
        return Path(path).suffix in _TORCH_SUFFIXES


class SafetensorsConverter:
    """Converter of safetensors files and Hugging Face folders."""

    def detect(self, path: Place) -> bool:
        """Whether the path is a safetensors file, or a folder of such files without a checkpoint index."""
        place = Path(path)
        if place.is_dir():
            has_files = (place / INDEX_NAME).exists() or any(place.glob(f"*{SUFFIX}"))
            return has_files and not is_checkpoint(place)
        return place.is_file() and (place.name.endswith((SUFFIX, _INDEX_SUFFIX)) or _begins_as_one(place))

    def suits(self, path: Place) -> bool:
        """Whether the suffix is `.safetensors` (a file) or `.hf` (a folder)."""
        return Path(path).suffix in (SUFFIX, ".hf")

    def read(self, path: Place) -> Content:
        """Read a safetensors file or folder as a `Content`."""
        folder = open_safetensors(path)
        return stored_content(folder.store, folder.index)

    write = staticmethod(write_safetensors)


def _begins_as_one(path: Path) -> bool:
    """Whether a file begins with a header length that fits the file, then JSON."""
    with path.open("rb") as file:
        head = file.read(9)
    return len(head) == 9 and head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
