"""Public names for packages that implement block transforms."""

from __future__ import annotations

from dcp_core.encoding.compression import BlockChain, BlockTransformExtension, BlockUndo, block_bytes

__all__ = ["BlockChain", "BlockTransformExtension", "BlockUndo", "block_bytes"]
