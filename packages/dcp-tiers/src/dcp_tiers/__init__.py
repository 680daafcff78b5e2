"""Tiers: checkpoints on several storages. A save ends when the nearest has it; promotion brings it to the others.

This package does not use torch.
"""

from dcp_tiers.errors import PromotionError, TiersError
from dcp_tiers.keep_waiting import KeepWaiting
from dcp_tiers.listing import CopyState, TieredStep
from dcp_tiers.tier import Tier
from dcp_tiers.tiers import Tiers

__all__ = ["CopyState", "KeepWaiting", "PromotionError", "Tier", "TieredStep", "Tiers", "TiersError"]
