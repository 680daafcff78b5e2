"""Mirror of `torch.distributed.checkpoint.stateful`: re-exports only."""

from dcp_core.protocols import Stateful, StatefulT

__all__ = ["Stateful", "StatefulT"]
