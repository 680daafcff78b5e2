from __future__ import annotations

import subprocess
import sys

import dcp_manifest


def test_importing_it_imports_no_torch():
    code = "import sys, dcp_manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], check=False).returncode == 0


def test_every_name_is_there_once():
    assert sorted(set(dcp_manifest.__all__)) == sorted(dcp_manifest.__all__)
    assert [name for name in dcp_manifest.__all__ if not hasattr(dcp_manifest, name)] == []
