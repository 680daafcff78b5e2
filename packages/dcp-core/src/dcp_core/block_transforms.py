"""Public names of `dcp_core.encoding.block_transforms`, for packages that implement transforms of blocks."""

from __future__ import annotations

from dcp_core.encoding.block_transforms import BlockChain, BlockTransformExtension, BlockUndo, block_bytes, block_undo

__all__ = ["BlockChain", "BlockTransformExtension", "BlockUndo", "block_bytes", "block_undo"]
