"""Errors of tiers and of promotion."""

from __future__ import annotations

from dcp_manifest import DcpError

__all__ = ["PromotionError", "SupersededError", "TierFullError", "TiersError"]


class TiersError(DcpError, ValueError):
    """The description of tiers is wrong: no tier, a tier twice, or a file that cannot be read as a description."""


class PromotionError(DcpError, RuntimeError):
    """A checkpoint cannot be promoted, however often it is tried: it is damaged, or of a kind that is not copied."""


class SupersededError(PromotionError):
    """A checkpoint is not promoted, because the tier has a later save of the same step."""


class TierFullError(DcpError, OSError):
    """A checkpoint cannot be promoted yet, because it would exceed the byte budget of its tier."""
