"""Conformance test suites for storages and transforms. They need pytest.

`dcp_io.testing` has the suite for stores.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"dcp_core.testing.conformance.{name}" for name in ("damage", "on_ranks", "resaving", "suite", "transforms"))
)

from dcp_core.testing.conformance.folder import Door, LocalFolder, RawFolder  # noqa: E402 - asserts are rewritten on import
from dcp_core.testing.conformance.suite import StorageConformance  # noqa: E402
from dcp_core.testing.conformance.transforms import (  # noqa: E402
    BlockTransformConformance,
    StreamTransformConformance,
)

__all__ = [
    "BlockTransformConformance",
    "Door",
    "LocalFolder",
    "RawFolder",
    "StorageConformance",
    "StreamTransformConformance",
]
