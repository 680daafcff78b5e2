"""Checkpoints in the memory of a host, in a keeper process that outlives trainers; URIs `keeper://RUN`.

This package does not use torch. Names are imported on first use: a keeper needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_memory.client.store import KeeperStore
    from dcp_memory.control import KeeperStatus, keeper_status, start_keeper, stop_keeper
    from dcp_memory.errors import KeeperFullError, KeeperLostError, KeeperRefusedError, KeeperStartError
    from dcp_memory.partners.partner import Partner, partner

__all__ = [
    "KeeperFullError",
    "KeeperLostError",
    "KeeperRefusedError",
    "KeeperStartError",
    "KeeperStatus",
    "KeeperStore",
    "Partner",
    "keeper_status",
    "partner",
    "start_keeper",
    "stop_keeper",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_memory.client.store": ("KeeperStore",),
        "dcp_memory.control": ("KeeperStatus", "keeper_status", "start_keeper", "stop_keeper"),
        "dcp_memory.errors": ("KeeperFullError", "KeeperLostError", "KeeperRefusedError", "KeeperStartError"),
        "dcp_memory.partners.partner": ("Partner", "partner"),
    },
)
