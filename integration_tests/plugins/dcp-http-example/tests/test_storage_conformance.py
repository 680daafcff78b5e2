"""The reader and writer pass the suite of `dcp_core`, found by entry point and explicitly, on one rank and two."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from dcp_core.testing.conformance import StorageConformance
from dcp_http_example import HttpReader, HttpWriter
from dcp_http_example.raw_folder import RawFolder
from dcp_http_example.server import ObjectServer

_numbers = itertools.count()


@pytest.mark.slow  # the same engine as dcp-object, which is judged in the short suite; the store is judged there, too
class TestHttpStorage(StorageConformance):
    @pytest.fixture
    def folder(self) -> str:
        return f"runs/{next(_numbers)}/checkpoint"

    @pytest.fixture
    def checkpoint_id(self, server: ObjectServer, folder: str) -> str:
        return server.url(folder)

    @pytest.fixture
    def raw(self, server: ObjectServer, folder: str) -> RawFolder:
        return RawFolder(server, folder)

    @pytest.fixture
    def bytes_given(self, server: ObjectServer) -> Callable[[], int]:
        return lambda: server.bytes_sent

    def make_writer(self, checkpoint_id: str) -> HttpWriter:
        return HttpWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> HttpReader:
        return HttpReader(checkpoint_id)
