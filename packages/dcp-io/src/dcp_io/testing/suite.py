"""`StoreConformance`: every test of a store, as one class to derive from."""

from __future__ import annotations

from dcp_io.testing.folders import FolderTests
from dcp_io.testing.listing import ListingTests
from dcp_io.testing.objects import ObjectTests
from dcp_io.testing.publishing import PublishingTests

__all__ = ["StoreConformance"]


class StoreConformance(ObjectTests, PublishingTests, ListingTests, FolderTests):
    """All tests of a store. Derive a test class that opens the store, and gives raw access to its objects.

    ```python
    class TestMyStore(StoreConformance):
        @pytest.fixture
        def place(self, tmp_path):
            return tmp_path

        def open_store(self, place, folder):
            return MyStore(place / folder)

        def open_raw(self, place, folder):
            return MyRawFolder(place / folder)
    ```
    """
