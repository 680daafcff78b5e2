"""What a release builds: wheels with the project's addresses and working links, which install from a git repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from integration_tests.composition.selections import PACKAGES, closure, libraries
from tools.release.staged import repository_address, stage

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://forge.example/people/dcp"
LINK = re.compile(r"\]\(([^)]+)\)")


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("packages/*")))
def test_links_of_a_released_readme_work_outside_the_repository(name: str, tmp_path: Path) -> None:
    released = (stage(ROOT, name, "0.1.0", tmp_path / "with", ADDRESS) / "README.md").read_text()
    for target in LINK.findall(released):
        assert target.startswith("https://"), target
        if target.startswith(ADDRESS):
            path = re.sub(rf"^{ADDRESS}/(blob|tree)/v0.1.0/|#.*$", "", target)
            assert (ROOT / path).exists(), target
    nowhere = (stage(ROOT, name, "0.1.0", tmp_path / "without", None) / "README.md").read_text()
    assert [target for target in LINK.findall(nowhere) if not target.startswith("https://")] == []


def test_a_wheel_says_where_the_project_is_and_which_python_runs_it(tmp_path: Path) -> None:
    folder = stage(ROOT, "dcp-base", "0.1.0", tmp_path, ADDRESS)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=folder, check=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("METADATA"))
        said = message_from_string(archive.read(name).decode())
    urls = dict(line.split(", ") for line in said.get_all("Project-URL", []))
    assert urls["Changelog"] == f"{ADDRESS}/blob/v0.1.0/packages/dcp-base/CHANGELOG.md"
    assert urls.keys() == {"Homepage", "Repository", "Documentation", "Changelog", "Issues"}
    assert "Programming Language :: Python :: 3.11" in said.get_all("Classifier", [])
    assert f"]({ADDRESS}/blob/v0.1.0/docs/hooks.md)" in said.get_payload()


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@forge.example:people/dcp.git", ADDRESS),
        ("ssh://git@forge.example/people/dcp", ADDRESS),
        ("https://token@forge.example/people/dcp.git", ADDRESS),
        ("/srv/git/dcp", None),
        ("", None),
    ],
)
def test_the_address_is_that_of_the_remote(
    remote: str, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DCP_REPOSITORY", raising=False)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert repository_address(tmp_path) == address
    monkeypatch.setenv("DCP_REPOSITORY", "https://elsewhere.example/dcp/")
    assert repository_address(tmp_path) == "https://elsewhere.example/dcp"


def test_packages_install_from_folders_of_a_git_repository(tmp_path: Path) -> None:
    # As docs/install.md writes it. All that others wrote is here already, so that no index is asked.
    names = closure(("dcp-inspect",))
    clone = tmp_path / "clone"
    for name in names:
        shutil.copytree(PACKAGES[name], clone / "packages" / name, ignore=shutil.ignore_patterns("__pycache__"))
    git = ("git", "-C", str(clone), "-c", "user.name=x", "-c", "user.email=x@y.example")
    subprocess.run(["git", "init", "--quiet", clone], check=True)
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "all"], check=True)
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(str(libraries(tmp_path / "libraries")))
    lines = [f"{name} @ git+file://localhost{clone}#subdirectory=packages/{name}" for name in names]
    alone = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    pip = (str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation")
    subprocess.run([*pip, *lines], check=True, env=alone)
    code = "import dcp_inspect as a, dcp_io as b, dcp_manifest as c; print(a.__file__, b.__file__, c.__file__)"
    said = subprocess.run([home / "bin" / "python", "-c", code], check=True, env=alone, capture_output=True, text=True)
    assert all(Path(each).is_relative_to(home) for each in said.stdout.split()), said.stdout
    shown = subprocess.run([home / "bin" / "dcp", "--help"], check=True, env=alone, capture_output=True, text=True)
    assert "Usage: dcp" in shown.stdout
