"""Rank processes for tests: re-exports of `dcp_ranks.testing.ranks`."""

from dcp_ranks.testing.ranks import RankError, RankFailure, RankPool

__all__ = ["RankError", "RankFailure", "RankPool"]
