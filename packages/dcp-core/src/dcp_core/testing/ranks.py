"""Real ranks for tests of packages that build on `dcp_core`: `dcp_ranks.testing.ranks`, re-exported."""

from dcp_ranks.testing.ranks import RankError, RankFailure, RankPool

__all__ = ["RankError", "RankFailure", "RankPool"]
