"""Types of columns, and arithmetic on columns that NumPy has no function for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Numbers", "Positions", "expand"]

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


def expand(starts: Positions | Numbers, counts: Positions | Numbers) -> Positions:
    """Return `starts[0], starts[0] + 1, …` of `counts[0]` numbers, then those of the next."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    found: Positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return found
