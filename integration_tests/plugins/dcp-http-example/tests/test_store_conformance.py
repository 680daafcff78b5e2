"""The store passes the suite of `dcp_io`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from dcp_http_example import HttpStore
from dcp_http_example.address import parse_address
from dcp_http_example.raw_folder import RawFolder
from dcp_http_example.server import ObjectServer
from dcp_io.testing import FoldersConformance, StoreConformance

_numbers = itertools.count()


class TestHttpStore(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self, server: ObjectServer) -> Any:
        return server, f"place{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> HttpStore:
        server, root = place
        return HttpStore(parse_address(server.url(f"{root}/{folder}")))

    def open_raw(self, place: Any, folder: str) -> RawFolder:
        server, root = place
        return RawFolder(server, f"{root}/{folder}")
