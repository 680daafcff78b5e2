"""The conformance suite for storages: what a reader and writer pair must do, whoever wrote it. Needs pytest.

Stores of bytes, on which most storages are built, have a suite of their own: `dcp_io.testing`.
"""

import pytest

pytest.register_assert_rewrite(
    *(f"dcp_core.testing.conformance.{name}" for name in ("damage", "on_ranks", "reading", "resaving", "round_trips"))
)

from dcp_core.testing.conformance.folder import Door, LocalFolder, RawFolder  # noqa: E402 - asserts are rewritten on import
from dcp_core.testing.conformance.suite import StorageConformance  # noqa: E402

__all__ = ["Door", "LocalFolder", "RawFolder", "StorageConformance"]
