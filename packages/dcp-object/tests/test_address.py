"""Which ids mean an object store, and which folder."""

from __future__ import annotations

import pytest

from dcp_core import UnsafeCheckpointError
from dcp_object.address import Address, is_address, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://bucket/a/b", Address("s3://bucket", "a/b")),
        ("S3://bucket/a/b//", Address("s3://bucket", "a/b")),
        ("s3://bucket", Address("s3://bucket")),
        ("gs://bucket/a b/c", Address("gs://bucket", "a b/c")),
        ("abfss://box@account.dfs.core.windows.net/a", Address("abfss://box@account.dfs.core.windows.net/a")),
    ],
)
def test_parts(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert is_address(text)


def test_names_in_folders() -> None:
    root = parse_address("s3://bucket")
    assert root.key("x") == "x"
    child = root.child("a").child("b/c")
    assert (child.url, child.key("x")) == ("s3://bucket/a/b/c", "a/b/c/x")


@pytest.mark.parametrize("text", ["bucket/a", "/a", "file:///a", "memory://a", "s3://", "s3:///a"])
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="scheme://container/folder"):
        parse_address(text)


@pytest.mark.parametrize("text", ["s3://key:secret@bucket/a", "s3://bucket/a?token=1", "abfss://a:b@c/d"])
def test_credentials_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither credentials nor parameters"):
        parse_address(text)


@pytest.mark.parametrize("text", ["s3://bucket/a/../b", "s3://bucket/./a", "s3://bucket/a//b"])
def test_folders_stay_inside(text: str) -> None:
    with pytest.raises(UnsafeCheckpointError):
        parse_address(text)
