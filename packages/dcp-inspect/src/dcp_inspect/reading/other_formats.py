"""dcp-format, which reads files of other formats, compressed values and objects with tensors, and needs PyTorch."""

from __future__ import annotations

import importlib
import os
from typing import Any

from dcp_inspect.places import is_uri
from dcp_manifest import CheckpointNotFoundError, UnsupportedFormatError

__all__ = ["check_exists", "formats", "open_other_format"]

_PYTORCH = "PyTorch, which is not installed (https://pytorch.org/get-started says how)"


def formats(purpose: str) -> Any:
    """Import dcp-format.

    Args:
        purpose: Subject of the message if it cannot be imported: what needs it.

    Raises:
        UnsupportedFormatError: dcp-format, a package that it needs, or torch is missing; the message names the one to
            install.
    """
    try:
        importlib.import_module("dcp_format.conversion")  # torch included, which its front door leaves for later
        return importlib.import_module("dcp_format")
    except ImportError as error:
        missing = (error.name or "dcp_format").partition(".")[0]
        if missing == "torch":
            lack = _PYTORCH
        else:
            # Not `pip install NAME`, as long as the index may give that name to somebody else.
            name = missing.replace("_", "-")
            lack = f"{name}, which is not installed: install it from the source of your other dcp packages"
            lack = lack if name.startswith("dcp-") else f"{name}, which is not installed"
        raise UnsupportedFormatError(f"{purpose} needs {lack}") from error


def check_exists(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointNotFoundError if there is nothing at a path; does not look at URIs."""
    if not is_uri(path) and not os.path.lexists(path):
        raise CheckpointNotFoundError(f"there is nothing at {os.fspath(path)}: check the path")


def open_other_format(path: str | os.PathLike[str]) -> Any:
    """Open a file, or a folder without a checkpoint, of another format as a `dcp_format.Content`.

    Raises:
        UnsupportedFormatError: No installed converter recognises the format, or dcp-format is missing.
    """
    try:
        package = formats(f"{os.fspath(path)} is of another format, and reading it")
    except UnsupportedFormatError:
        if os.path.isfile(path) and not _may_be_known(path):
            raise UnsupportedFormatError(
                f"{os.fspath(path)} is no checkpoint's folder, torch.save file or safetensors file"
            ) from None
        raise
    return package.open_content(path)


def _may_be_known(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like an archive of torch.save or numpy, a pickle, or a safetensors file."""
    with open(path, "rb") as file:
        head = file.read(9)
    return head.startswith((b"PK", b"\x80")) or head[8:] == b"{"
