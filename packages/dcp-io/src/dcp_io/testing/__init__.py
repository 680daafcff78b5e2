"""Conformance test suite for implementations of `dcp_io.Store`, to be run by their authors. Needs pytest.

A store conforms if it passes `StoreConformance` and the suite of each ability: `FoldersConformance`,
`RangesConformance`, `LendingConformance`. `dcp_core.testing.conformance` tests checkpoints on the store.
"""

import pytest

pytest.register_assert_rewrite("dcp_io.testing.abilities", "dcp_io.testing.objects", "dcp_io.testing.suite")

# Asserts are rewritten on import.
from dcp_io.testing.abilities import FoldersConformance, LendingConformance, RangesConformance  # noqa: E402
from dcp_io.testing.folder import RawFolder, StoreFixtures  # noqa: E402
from dcp_io.testing.suite import StoreConformance  # noqa: E402

__all__ = [
    "FoldersConformance",
    "LendingConformance",
    "RangesConformance",
    "RawFolder",
    "StoreConformance",
    "StoreFixtures",
]
