"""Names of the classes in pickles of `torch.distributed.checkpoint`, as strings: torch is not imported.

Source: torch 2.13 `torch.distributed.checkpoint.metadata` and `.filesystem`; also the names in older versions, and of
`pathlib` in CPython 3.13.0.
"""

from __future__ import annotations

__all__ = ["FILESYSTEM", "GET_LAYOUT", "METADATA", "OLD_METADATA", "PATH_CLASSES", "STOCK_VERSION", "TORCH"]

METADATA = "torch.distributed.checkpoint.metadata"
OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of `TensorProperties` before torch 2.3."""
FILESYSTEM = "torch.distributed.checkpoint.filesystem"
TORCH = "torch"
GET_LAYOUT = ("torch.serialization", "_get_layout")
PATH_CLASSES = frozenset(
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
)
STOCK_VERSION = "1.0.0"
"""Value of `Metadata.version` in stock's files."""
