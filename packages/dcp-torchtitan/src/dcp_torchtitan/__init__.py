"""torchtitan's checkpointer over this library, with the same options and directories `step-N`, in both directions."""

from dcp_torchtitan.checkpoint_manager import DcpCheckpointManager

__all__ = ["DcpCheckpointManager"]
