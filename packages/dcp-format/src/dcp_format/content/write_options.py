"""Options for writing content, which all formats share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dcp_io import Layout

__all__ = ["WriteOptions"]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options for writing; each format uses those that apply to it.

    Args:
        max_inflight_bytes: Memory for pieces of tensors.
        overwrite: Whether an existing destination may be replaced.
        shard_bytes: Size that one file may have, where a format has several.
        objects: `refuse`, `beside` or `skip`, where a format holds tensors only.
        layout: Layout of a checkpoint's data files.
        compression: For a checkpoint's data: `auto`, `planes`, `zstd`, or another setting of `FileSystemWriter`.
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
