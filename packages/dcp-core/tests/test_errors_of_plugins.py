from __future__ import annotations

import subprocess
import sys

import dcp_base
from dcp_core import errors


def test_errors_of_plugins_are_caught_as_either_packages() -> None:
    for name in ("PluginNotFoundError", "PluginLoadError"):
        assert issubclass(getattr(errors, name), (errors.DcpError))
        assert issubclass(getattr(errors, name), getattr(dcp_base, name))


def test_importing_dcp_core_reads_no_entry_points() -> None:
    code = (
        "import importlib.metadata as m\n"
        "def refuse(*args, **kwargs): raise AssertionError('read entry points')\n"
        "import torch\n"
        "m.entry_points = refuse\n"
        "import dcp_core.plugins\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
