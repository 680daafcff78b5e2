"""Modification times of files, in the forms that file systems report."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from dcp_fsspec.store import modified_seconds

UNKNOWN = -1.0
YEAR_2026 = 1767225600.0


class Silent:
    """A file system without modification times."""

    def modified(self, path: str) -> Any:
        raise NotImplementedError(path)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"mtime": YEAR_2026}, YEAR_2026),
        ({"mtime": dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)}, YEAR_2026),
        ({"LastModified": dt.datetime.fromisoformat("2026-01-01")}, YEAR_2026),
        ({"updated": "2026-01-01T00:00:00Z"}, YEAR_2026),
        ({"modificationTime": YEAR_2026 * 1000}, YEAR_2026),  # webhdfs
        ({"modify": "20260101000000"}, YEAR_2026),  # ftp
        ({"modify": "20260101000000.25"}, YEAR_2026),
        ({"modify": "Jan  1 00:00"}, UNKNOWN),  # ftp, by the server's `ls`
        ({"updated": "yesterday"}, UNKNOWN),
        ({"mtime": None}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_each_form_is_understood(info: dict[str, Any], expected: float) -> None:
    assert modified_seconds({"name": "a", **info}, Silent(), otherwise=UNKNOWN) == expected


def test_a_file_system_is_asked_if_its_listing_has_no_time() -> None:
    class Knowing:
        def modified(self, path: str) -> dt.datetime:
            assert path == "a"
            return dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)

    assert modified_seconds({"name": "a"}, Knowing(), otherwise=UNKNOWN) == YEAR_2026
