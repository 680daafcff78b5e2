"""`LoopbackS3`: the server in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from integration_tests.kits.s3_server import S3Server

__all__ = ["LoopbackS3"]


class LoopbackS3(S3Server):
    """A running server; used like `S3Server`. Run from the repository's root."""

    command: ClassVar[Sequence[str]] = (sys.executable, "-m", "integration_tests.benchmarks.loopback_s3")
