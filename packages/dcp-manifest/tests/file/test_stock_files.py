"""What is said of a whole file of stock's."""

from __future__ import annotations

from dcp_manifest.file.index_problems import examine


def test_nothing_is_wrong_with_them(stock):
    assert examine(stock.pickle(stock.metadata()), file="f").problems == ()
