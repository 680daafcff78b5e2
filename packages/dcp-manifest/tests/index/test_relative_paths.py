from __future__ import annotations

import pytest

from dcp_manifest import UnsafeCheckpointError
from dcp_manifest.index.relative_paths import check_relative_path


@pytest.mark.parametrize("path", ["a", "__0_0.distcp", "a/b/c", "a.b/..c", "ä ö", "...", "ab:c"])
def test_paths_inside(path):
    check_relative_path(path, file="f")


@pytest.mark.parametrize(
    "path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/./b", "a\\b", "a\0", "c:a"]
)
def test_paths_elsewhere(path):
    with pytest.raises(UnsafeCheckpointError, match="f names"):
        check_relative_path(path, file="f")
