"""Transforms of stored bytes. Storages take them as settings; a reader finds them by what the index says.

Not here: when an item is encoded, and where its bytes go.
"""

from dcp_transforms.block_zstd import BlockZStandard
from dcp_transforms.float_planes import FloatPlanes
from dcp_transforms.zstd import ZStandard

__all__ = ["BlockZStandard", "FloatPlanes", "ZStandard"]
