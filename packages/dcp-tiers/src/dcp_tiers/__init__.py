"""Tiers: checkpoints on several storages. A save ends in the nearest tier; promotion copies it to the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_tiers.tier import Tier as Tier
    from dcp_tiers.tier import TiersError as TiersError
    from dcp_tiers.tiers import Tiers as Tiers
    from dcp_tiers.waiting import KeepWaiting as KeepWaiting

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_tiers.tier": ("Tier", "TiersError"),
        "dcp_tiers.tiers": ("Tiers",),
        "dcp_tiers.waiting": ("KeepWaiting",),
    },
)
