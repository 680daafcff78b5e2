"""Real ranks for tests of packages over `dcp_core`: those of `dcp_ranks.testing.ranks`, re-exported."""

from dcp_ranks.testing.ranks import RankError, RankFailure, RankPool

__all__ = ["RankError", "RankFailure", "RankPool"]
