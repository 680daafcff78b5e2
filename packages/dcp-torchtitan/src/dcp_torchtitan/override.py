"""Override for torchtitan's command line that replaces the checkpoint manager of any configuration.

Not imported by the package's `__init__`: torchtitan imports it when `--override.imports` names it.
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.config.override import derive, override

from dcp_torchtitan.checkpoint_manager import DcpCheckpointManager

__all__ = ["dcp_checkpoints"]


@override(target=CheckpointManager.Config, description="checkpoints by dcp", exact=True)  # type: ignore[untyped-decorator]
def dcp_checkpoints(config: Any, **options: Any) -> DcpCheckpointManager.Config:
    """Replace the configuration of torchtitan's own manager by one of ours with the same values.

    `--override.imports dcp_torchtitan.override.dcp_checkpoints` selects it; options of `DcpCheckpointManager.Config`
    may follow as JSON: `'dcp_torchtitan.override.dcp_checkpoints={"tolerated_failures": 2}'`.

    Raises:
        ValueError: `options` has an unknown option.
    """
    derived: DcpCheckpointManager.Config = derive(config, DcpCheckpointManager.Config, **options)
    return derived
