"""torchtitan imports this override if `--override.imports` names it; it replaces the checkpoint manager."""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive, override

from dcp_torchtitan.checkpoint_manager import DcpCheckpointManager


@override(target=CheckpointManager.Config, description="checkpoints by dcp", exact=True)  # type: ignore[untyped-decorator]
def dcp_checkpoints(config: Any, **options: Any) -> DcpCheckpointManager.Config:
    """Convert torchtitan's configuration to ours.

    `--override.imports` selects it; options may follow as JSON:
    `'dcp_torchtitan.override.dcp_checkpoints={"tolerated_failures": 2}'`. Unknown options raise ValueError.
    """
    derived: DcpCheckpointManager.Config = derive(config, DcpCheckpointManager.Config, **options)
    return derived
