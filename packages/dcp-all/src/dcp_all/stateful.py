"""Mirror of `torch.distributed.checkpoint.stateful`: re-exports only."""

from dcp_core.records.protocols import Stateful, StatefulT

__all__ = ["Stateful", "StatefulT"]
