"""Checkpoints of Lightning's Trainer and Fabric: `DcpCheckpointIO`, a plug-in for both.

With the strategies of `dcp_lightning.strategies` (Trainer) and `dcp_lightning.fabric`, ranks save their own shards.
"""

from dcp_lightning.checkpoint_io import DcpCheckpointIO

__all__ = ["DcpCheckpointIO"]
