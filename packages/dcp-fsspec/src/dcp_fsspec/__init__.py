"""Checkpoints in fsspec's file systems: `FsspecWriter`, `FsspecReader`, and `open_store` for tools without torch.

Planning and coordination live in `dcp_core`, the life of a save in `dcp_io`, protocols in fsspec and its packages. The
reader and writer are imported when they are first asked for, since they need torch and the store does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_core.storage.serialization_format import SerializationFormat
from dcp_fsspec.filesystem import FileSystem
from dcp_fsspec.opening import open_store
from dcp_fsspec.store import FsspecStore

if TYPE_CHECKING:
    from dcp_fsspec.reader import FsspecReader
    from dcp_fsspec.writer import FsspecWriter

__all__ = ["FileSystem", "FsspecReader", "FsspecStore", "FsspecWriter", "SerializationFormat", "open_store"]


def __getattr__(name: str) -> Any:
    if name == "FsspecReader":
        from dcp_fsspec.reader import FsspecReader  # noqa: PLC0415 - needs torch

        return FsspecReader
    if name == "FsspecWriter":
        from dcp_fsspec.writer import FsspecWriter  # noqa: PLC0415 - needs torch

        return FsspecWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
