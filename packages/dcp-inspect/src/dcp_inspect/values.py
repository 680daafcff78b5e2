"""Values of checkpoints and files of every format, through the converters of dcp-format.

This is the one place that needs torch and `dcp-format`; both are imported when a command needs them.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from dcp_manifest import UnsupportedFormatError

__all__ = ["formats", "open_values", "tensor_of", "tensor_rows"]


def formats() -> Any:
    """Import dcp-format.

    Raises:
        UnsupportedFormatError: dcp-format, a package that it needs, or torch is missing; the message names the one to
            install.
    """
    try:
        importlib.import_module("dcp_format.conversion")  # torch included, which its front door leaves for later
        return importlib.import_module("dcp_format")
    except ImportError as error:
        raise UnsupportedFormatError(
            f"this needs the values of tensors, and {error.name or 'dcp_format'} is not installed: "
            "install dcp-format, from the source of your other dcp packages"
        ) from error


def open_values(path: str | os.PathLike[str]) -> Any:
    """Open a checkpoint or file as content; see `dcp_format.Content`."""
    return formats().open_content(path)


def tensor_of(entry: Any) -> Any:
    """Read a whole tensor into memory."""
    return _tensor(entry, bytearray().join(entry.data.pieces(64 << 20)), entry.shape)


def tensor_rows(entry: Any, start: int, stop: int) -> Any:
    """Read rows [start, stop) of a tensor with at least one dimension; reads only these rows if the format allows."""
    rows = getattr(entry.data, "rows", None)
    if rows is None:
        return tensor_of(entry)[start:stop]
    return _tensor(entry, bytearray(rows(start, stop)), (stop - start, *entry.shape[1:]))


def _tensor(entry: Any, data: bytearray, shape: tuple[int, ...]) -> Any:
    torch = importlib.import_module("torch")
    dtype = getattr(torch, entry.dtype)
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
