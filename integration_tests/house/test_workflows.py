"""What the repository's host runs: sessions that exist, packages in the order of their needs, checked messages."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import yaml

from tools.release.versions import order

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
problems = runpy.run_path(str(ROOT / ".github" / "commit_message.py"))["problems"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_runs_sessions_that_exist(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"]
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    named = set(re.findall(r"nox -s (\w+)", path.read_text()))
    named.update(*(job.get("strategy", {}).get("matrix", {}).get("session", []) for job in jobs.values()))
    assert named <= sessions
    assert all("timeout-minutes" in job for job in jobs.values() if "steps" in job)


def test_packages_are_published_after_those_they_need() -> None:
    packages = order(ROOT)
    assert {*packages} == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    for number, package in enumerate(packages):
        needed = re.findall(r'^    "(dcp-\w+)>=.*",$', _needs(package), re.MULTILINE)
        assert {*needed} <= {*packages[:number]}, package


def _needs(package: str) -> str:
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    found = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def test_the_hooks_of_commits_run_the_pinned_linter() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in repositories] == ["local"], "hooks of other repositories need them to be reachable"
    installed = {line for hook in repositories[0]["hooks"] for line in hook.get("additional_dependencies", ())}
    assert installed
    assert installed <= {*(ROOT / "constraints.txt").read_text().splitlines()}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("tiers: apply retention after the last promotion\n\nA run that ended left all steps.", ""),
        ("dcp-core shards, load: read less\n\nWhy.", ""),
        ("Merge branch 'x'", ""),
        ("apply retention\n\nWhy.", "is not `area: summary`"),
        ("tiers: apply retention", "no body"),
        ("tiers: apply retention\nWhy.", "no empty line"),
        ("tiers: apply retention.\n\nWhy.", "full stop"),
        (f"tiers: {'a' * 70}\n\nWhy.", "77 characters"),
    ],
)
def test_commit_message_says_where_what_and_why(message: str, said: str) -> None:
    found = problems(message)
    assert found == [] if not said else any(said in each for each in found)
