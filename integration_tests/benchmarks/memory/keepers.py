"""Keepers of pretended hosts: each host has a folder of its own for sockets, named by an environment variable."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dcp_memory import stop_keeper
from integration_tests.benchmarks.rank_jobs import host_of

__all__ = ["RUN", "Keepers", "keepers_of"]

RUN = "benchmark"
_VARIABLE = "DCP_KEEPER_DIR"


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keepers of so many hosts; ranks start them with their first save."""

    folder: Path
    hosts: int

    def environment(self, ranks: int, rank: int) -> Mapping[str, str]:
        """Variables for a rank."""
        host = host_of(rank, ranks, self.hosts)
        return {_VARIABLE: str(self.folder / f"host-{host}"), "HOST": str(host)}

    def stop(self, host: int) -> None:
        """End the keeper of a host, whose checkpoints are lost by that."""
        with self.asked(host):
            stop_keeper(RUN)

    @contextlib.contextmanager
    def asked(self, host: int) -> Iterator[None]:
        """Context manager: this process is a client of a host's keeper."""
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = str(self.folder / f"host-{host}")
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE)
            if before is not None:
                os.environ[_VARIABLE] = before


@contextlib.contextmanager
def keepers_of(hosts: int) -> Iterator[Keepers]:
    """Context manager: keepers that end with the block."""
    with TemporaryDirectory(prefix="keepers-") as folder:
        made = Keepers(Path(folder), hosts)
        try:
            yield made
        finally:
            for host in range(hosts):
                made.stop(host)
