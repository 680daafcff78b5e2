"""Checkpoints of Lightning's Trainer and Fabric: `DcpCheckpointIO`, a plug-in for both.

Strategies whose ranks each save their own shards are in `dcp_lightning.strategies` for the Trainer, and in
`dcp_lightning.fabric` for Fabric.
Lightning's `ModelCheckpoint` decides when to save, and which checkpoints to keep.
"""

from dcp_lightning.checkpoint_io import DcpCheckpointIO

__all__ = ["DcpCheckpointIO"]
