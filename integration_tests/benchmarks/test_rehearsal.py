"""Rehearsed and real saves of the same tensors write the same bytes; what they take is for the benchmark."""

from __future__ import annotations

from dcp_ranks.testing.ranks import RankPool
from integration_tests.benchmarks.rehearsal import compare


def test_rehearsed_ranks_write_the_bytes_of_real_ones() -> None:
    pool = RankPool(2)
    try:
        row = compare(pool, 2, mib=0.5, rounds=1)
    finally:
        pool.close()
    assert row["equal_bytes"]
    assert row["rehearsed_seconds"] > 0 < row["real_seconds"]
