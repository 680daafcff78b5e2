"""The environments of the rivals: `.nox/rivals/<name>`, made on first use, through `constraints.txt`."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from integration_tests.benchmarks.contenders import ENVIRONMENTS

__all__ = ["ROOT", "python_of"]

ROOT = Path(__file__).resolve().parents[2]


def python_of(name: str) -> str:
    """The Python of an environment; made anew if what belongs into it has changed.

    Raises:
        subprocess.CalledProcessError: pip failed; its output is in the exception.
    """
    requirements = ENVIRONMENTS[name]
    if requirements is None:
        return sys.executable
    folder = ROOT / ".nox" / "rivals" / name
    python, stamp = folder / "bin" / "python", folder / "installed.stamp"
    constraints = ROOT / "constraints.txt"
    wanted = hashlib.sha256("\n".join([sys.version, constraints.read_text(), *requirements]).encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, "-c", str(constraints), *requirements)
        stamp.write_text(wanted)
    return str(python)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
