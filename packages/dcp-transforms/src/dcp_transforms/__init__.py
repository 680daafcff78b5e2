"""Transforms of stored bytes (compression): writers get them as options, readers find them by the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_transforms.block_zstd import BlockZStandard as BlockZStandard
    from dcp_transforms.float_planes import FloatPlanes as FloatPlanes
    from dcp_transforms.zstd import ZStandard as ZStandard

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_transforms.block_zstd": ("BlockZStandard",),
        "dcp_transforms.float_planes": ("FloatPlanes",),
        "dcp_transforms.zstd": ("ZStandard",),
    },
)
