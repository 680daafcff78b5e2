"""What `nox -s release` runs with the built packages, outside the repository: import everything, save, load, verify."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from concurrent.futures import Future
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any


def main(modules: list[str]) -> None:
    """Import modules, and pass a checkpoint through the calls of `dcp_all` and the command."""
    for module in modules:
        found = importlib.import_module(module)
        assert str(found.__file__).startswith(sys.prefix), f"{module} is imported from {found.__file__}"
        assert version(module) == version("dcp_all")
    licensed = [each for each in distributions() if each.name.replace("-", "_") in modules]
    for each in licensed:
        assert (each.read_text("licenses/LICENSE") or "").startswith("BSD 3-Clause"), f"{each.name} has no licence"
    subprocess.run([Path(sys.executable).with_name("dcp-crash"), "--version"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        save_and_load(Path(folder))


def save_and_load(folder: Path) -> None:
    """Save at once and in the background, verify with the command, and load."""
    import torch

    import dcp_all as dcp

    state: dict[str, Any] = {"model": {"weight": torch.arange(6.0)}, "step": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "now", compression="auto"))
    later = dcp.async_save(state, checkpoint_id=folder / "later")
    assert isinstance(later, Future)
    later.result()
    for name in ("now", "later"):
        command = [str(Path(sys.executable).with_name("dcp")), "verify", str(folder / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        template: dict[str, Any] = {"model": {"weight": torch.zeros(6)}, "step": 0}
        assert not dcp.load(template, checkpoint_id=folder / name).missing
        assert torch.equal(template["model"]["weight"], state["model"]["weight"])
        assert template["step"] == 7


if __name__ == "__main__":
    main(sys.argv[1:])
