"""Which ids mean a local folder."""

from pathlib import Path

import pytest

from dcp_fs.paths import is_local_id, local_path


@pytest.mark.parametrize(
    ("checkpoint_id", "local"),
    [
        (Path("anywhere"), True),
        ("relative/folder", True),
        ("file:///tmp/x", True),
        ("local:///tmp/x", True),
        ("FILE:///tmp/x", True),
        ("s3://bucket/key", False),
        ("memory://x", False),
        ("https://host/x", False),
    ],
)
def test_local_ids(checkpoint_id: str | Path, local: bool) -> None:
    assert is_local_id(checkpoint_id) == local


@pytest.mark.parametrize("scheme", ["file", "local", "FILE", "Local"])
def test_uris_lose_their_scheme(scheme: str) -> None:
    assert local_path(f"{scheme}:///a/b") == Path("/a/b")
