"""What an import of everything leaves for later."""

from __future__ import annotations

import subprocess
import sys

import pytest

# DTensor brings sympy: together they take longer to import than all packages of ours.
LATER = ("sympy", "torch.distributed.tensor", "torch.distributed.checkpoint", "safetensors.torch", "rich")


@pytest.mark.parametrize("module", ["dcp_all", "dcp_state", "dcp_manager"])
def test_large_libraries_are_imported_when_they_are_needed(module: str) -> None:
    code = (
        "import sys, torch, torch.distributed; before = {*sys.modules}; import MODULE; print(*{*sys.modules} - before)"
    )
    command = [sys.executable, "-c", code.replace("MODULE", module)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    assert sorted({*ran.stdout.split()}.intersection(LATER)) == []
