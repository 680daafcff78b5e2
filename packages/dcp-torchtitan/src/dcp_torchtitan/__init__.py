"""torchtitan's checkpointer over this library: the same options, the same folders `step-N`, in both directions.

Other packages save, keep and find checkpoints. This one determines, as torchtitan does, what is saved and when.
"""

from dcp_torchtitan.checkpoint_manager import DcpCheckpointManager

__all__ = ["DcpCheckpointManager"]
