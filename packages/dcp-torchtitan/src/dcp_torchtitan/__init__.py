"""torchtitan's checkpointer over this library: the same options, the same folders `step-N`, in both directions.

How states are saved, kept and found is the other packages'; here is what torchtitan saves, and when.
"""

from dcp_torchtitan.checkpoint_manager import DcpCheckpointManager

__all__ = ["DcpCheckpointManager"]
