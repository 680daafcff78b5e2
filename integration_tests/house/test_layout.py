"""What lies at the top of the repository and of the integration tests, and that a line says what it is for."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from docs_site.reference import public_names

ROOT = Path(__file__).resolve().parents[2]
THE_PROJECT = {"README.md", "docs", "integration_tests", "noxfile.py", "packages", "tools"}
WANTED_BY_TOOLS = {
    ".ci": "the CI",
    ".github": "GitHub, for templates",
    ".gitignore": "git",
    ".pre-commit-config.yaml": "pre-commit",
    "CITATION.cff": "GitHub, and reference managers",
    "CONTRIBUTING.md": "GitHub",
    "LICENSE": "GitHub, and each package by a link",
    "SECURITY.md": "GitHub",
    "conftest.py": "pytest, for the tests of all packages",
    "constraints.txt": "pip",
    "mkdocs.yml": "MkDocs, which refuses a folder of pages that holds its settings",
    "pyproject.toml": "ruff, mypy, pytest, import-linter",
}
TESTS = ROOT / "integration_tests"
SHARED = {"__init__.py", "README.md", "failing.py", "forking.py", "launcher.py", "process_end.py"}


@pytest.fixture(scope="module")
def files() -> set[Path]:
    """Files that belong to the repository, new ones included."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: git says which files belong to it")
    asked = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    lines = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return {Path(line) for line in lines if (ROOT / line).exists()}


def test_the_top_holds_the_project_and_what_tools_look_for_there(files: set[Path]) -> None:
    assert {path.parts[0] for path in files} == THE_PROJECT | WANTED_BY_TOOLS.keys()


def test_integration_tests_are_in_folders_and_each_has_a_line(files: set[Path]) -> None:
    inside = [path.relative_to(TESTS.name) for path in files if path.parts[0] == TESTS.name]
    assert {path.name for path in inside if len(path.parts) == 1} == SHARED
    folders = {path.parts[0] for path in inside if len(path.parts) > 1}
    page = (TESTS / "README.md").read_text()
    assert re.findall(r"^\| `(\w+)/` \| [A-Z].+\. \|$", page, re.MULTILINE) == sorted(folders)


def test_folders_of_integration_tests_say_what_they_are_for() -> None:
    modules = [path for path in TESTS.glob("*/__init__.py") if not path.read_text().startswith('"""')]
    assert modules == []


def test_a_name_of_a_front_door_is_not_that_of_a_module() -> None:
    """`dcp_x.name` would mean either, as the site's links do. The modules of dcp-all are stock's, and its API."""
    doubled = {}
    for front in ROOT.glob("packages/*/src/*/__init__.py"):
        names = {*public_names(front.parent.name)}
        modules = {path.stem for path in front.parent.iterdir()}
        doubled[front.parent.name] = names & modules
    assert doubled.pop("dcp_all")
    assert doubled.pop("dcp_core") == {"plugins"}  # the module itself
    assert not any(doubled.values()), doubled
