"""`open_object_server`: an object server on a pretended host, which others reach over their networks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from integration_tests.benchmarks.loopback_s3 import LoopbackS3
from integration_tests.kits.networks import NetworkHost

__all__ = ["OpenServer", "open_object_server"]


class OpenServer(LoopbackS3):
    """An object server that listens on all addresses of its host."""

    command: ClassVar[Sequence[str]] = (sys.executable, "-m", "integration_tests.benchmarks.loopback_s3", "0.0.0.0")

    def environment_from(self, host: NetworkHost) -> Mapping[str, str]:
        """Variables for clients on other hosts, where this server is on `host`."""
        return self.environment(f"http://{host.addresses[0]}:{self.port}")


@contextlib.contextmanager
def open_object_server(host: NetworkHost) -> Iterator[OpenServer]:
    """Context manager: a server on a pretended host, on which this thread is within the block, too."""
    with host.entered(), contextlib.closing(OpenServer()) as server:
        yield server
