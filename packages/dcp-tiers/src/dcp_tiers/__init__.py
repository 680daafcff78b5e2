"""Tiers: checkpoints on several storages. A save ends when the nearest has it; promotion brings it to the others.

This package does not use torch. Names are imported on first use, so that looking for plug-ins is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_hooks import import_lazily

if TYPE_CHECKING:
    from dcp_tiers.errors import PromotionError, TiersError
    from dcp_tiers.listing import CopyState, TieredStep
    from dcp_tiers.tier import Tier
    from dcp_tiers.tiers import Tiers
    from dcp_tiers.waiting import KeepWaiting

__all__ = ["CopyState", "KeepWaiting", "PromotionError", "Tier", "TieredStep", "Tiers", "TiersError"]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_tiers.errors": ("PromotionError", "TiersError"),
        "dcp_tiers.listing": ("CopyState", "TieredStep"),
        "dcp_tiers.tier": ("Tier",),
        "dcp_tiers.tiers": ("Tiers",),
        "dcp_tiers.waiting": ("KeepWaiting",),
    },
)
