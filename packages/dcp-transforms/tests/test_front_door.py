"""Looking for plugins imports no codec; every name is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dcp_transforms


def test_the_plugin_imports_no_codec() -> None:
    asked = "import sys, dcp_transforms.plugin; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    loaded = {*ran.stdout.split()}
    assert "dcp_transforms.plugin" in loaded
    assert not {"zstandard", "dcp_transforms.float_planes", "dcp_transforms.zstd"} & loaded


def test_every_name_is_there() -> None:
    assert [getattr(dcp_transforms, name).__name__ for name in dcp_transforms.__all__] == dcp_transforms.__all__
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = dcp_transforms.nothing
