"""What is said of a whole file of stock's."""

from __future__ import annotations

import pytest

from dcp_manifest import CorruptCheckpointError, ManifestFile
from dcp_manifest.file.index_problems import examine


def test_they_have_no_manifest(stock):
    data = stock.pickle(stock.metadata())
    with pytest.raises(CorruptCheckpointError, match="no manifest"):
        ManifestFile(lambda offset, length: data[offset : offset + length], len(data), file="f")


def test_nothing_is_wrong_with_them(stock):
    assert examine(stock.pickle(stock.metadata()), file="f").problems == ()
