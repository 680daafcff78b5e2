"""Mirror of `torch.distributed.checkpoint.stateful`: re-exports only."""

from dcp_core.records.protocols import Stateful as Stateful
from dcp_core.records.protocols import StatefulT as StatefulT
