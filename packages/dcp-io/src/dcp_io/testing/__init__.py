"""Conformance test suite for implementations of `dcp_io.Store`, to be run by their authors. Needs pytest.

A store conforms if `StoreConformance` passes. `dcp_core.testing.conformance` tests checkpoints on the store.
"""

import pytest

pytest.register_assert_rewrite(
    "dcp_io.testing.objects",
    "dcp_io.testing.listing",
    "dcp_io.testing.publishing",
    "dcp_io.testing.folders",
    "dcp_io.testing.ranges",
)

from dcp_io.testing.folder import RawFolder, StoreFixtures  # noqa: E402 - asserts are rewritten on import
from dcp_io.testing.ranges import RangeConformance  # noqa: E402
from dcp_io.testing.suite import StoreConformance  # noqa: E402

__all__ = ["RangeConformance", "RawFolder", "StoreConformance", "StoreFixtures"]
