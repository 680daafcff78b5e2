"""Options for writing a file or checkpoint, shared by all formats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcp_io import Layout

__all__ = ["WriteOptions"]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options for writing a file or checkpoint; each format uses the options that apply to it.

    Args:
        max_inflight_bytes: Limit of the memory for pieces of tensors, in bytes.
        overwrite: Whether an existing destination may be replaced.
        shard_bytes: Maximum size of one file in bytes, for formats with several files.
        objects: Treatment of objects by formats that hold tensors only: `refuse` (raise an error), `beside` (write them
            to a file next to the tensors) or `skip` (leave them out).
        layout: Layout of a checkpoint's data files.
        compression: Compression of a checkpoint's data: `auto`, `planes`, `zstd`, or another setting of
            `FileSystemWriter`.
        tick: Progress callback: called with the number of bytes just converted.

    Example:
        ```python
        import torch
        from dcp_format import WriteOptions, convert

        torch.save({"weight": torch.ones(1000)}, "model.pt")
        convert("model.pt", "step-0", options=WriteOptions(layout="raw", compression="auto"))
        ```
    """

    max_inflight_bytes: int = 16 << 20
    overwrite: bool = False
    shard_bytes: int = 5_000_000_000
    objects: str = "refuse"
    layout: Layout = "torch"
    compression: Any = None
    tick: Callable[[int], None] = field(default=lambda _: None)
