"""Checkpoints in the memory of a host, in a keeper process that outlives trainers; URIs `keeper://RUN`.

This package does not use torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_memory.control import keeper_status as keeper_status
    from dcp_memory.control import start_keeper as start_keeper
    from dcp_memory.control import stop_keeper as stop_keeper
    from dcp_memory.errors import KeeperLostError as KeeperLostError
    from dcp_memory.partners.partner import partner as partner

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_memory.control": ("keeper_status", "start_keeper", "stop_keeper"),
        "dcp_memory.errors": ("KeeperLostError",),
        "dcp_memory.partners.partner": ("partner",),
    },
)
