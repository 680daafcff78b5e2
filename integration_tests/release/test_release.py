"""The checks of a release find what breaks its rules, and what is written for a version passes them."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

import pytest

from tools.release import change_notes, versions

DAY = dt.date(2027, 1, 31)
PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
dependencies = {dependencies}

[project.optional-dependencies]
testing = {testing}
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two packages, of which one needs the other, ready for a release."""
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 0.1.0\n")
    for name, dependencies, testing in (
        ("dcp-a", '["numpy>=1.26"]', '["dcp-b[testing]>=0.1,<0.2", "pytest>=8"]'),
        ("dcp-b", '["dcp-a>=0.1,<0.2"]', "[]"),
    ):
        folder = tmp_path / "packages" / name
        (folder / "changes").mkdir(parents=True)
        project = PROJECT.format(name=name, dependencies=dependencies, testing=testing)
        (folder / "pyproject.toml").write_text(project)
        (folder / "CHANGELOG.md").write_text(f"# Changelog of {name}\n\n## 0.1.0 (2027-01-01)\n\nFirst version.\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("packages/dcp-a/pyproject.toml", '"0.1.0"', '"0.1.1"', "dcp-a 0.1.1, dcp-b 0.1.0"),
        ("packages/dcp-a/pyproject.toml", '"0.1.0"', '"0.1"', "MAJOR.MINOR.PATCH"),
        ("packages/dcp-a/pyproject.toml", ">=0.1,<0.2", ">=0.1", r"write it as dcp-b>=0\.1,<0\.2"),
        ("packages/dcp-b/pyproject.toml", ">=0.1,<0.2", ">=0.2,<0.3", "dcp-b requires 'dcp-a>=0.2,<0.3'"),
        ("packages/dcp-b/pyproject.toml", ">=0.1,<0.2", "", "dcp-b requires 'dcp-a'"),
        ("CITATION.cff", "0.1.0", "0.1.1", "CITATION.cff"),
    ],
)
def test_versions_that_disagree_are_found(repository: Path, file: str, old: str, new: str, said: str) -> None:
    assert versions.disagreements(repository) == []
    path = repository / file
    path.write_text(path.read_text().replace(old, new, 1))
    (line,) = versions.disagreements(repository)
    assert re.search(said, line)


def test_a_version_is_written_into_everything(repository: Path) -> None:
    versions.write(repository, "1.12.3", DAY)
    assert versions.disagreements(repository) == []
    assert '"dcp-b[testing]>=1.12,<1.13", "pytest>=8"' in (repository / "packages/dcp-a/pyproject.toml").read_text()
    assert (repository / "CITATION.cff").read_text() == "title: x\nversion: 1.12.3\ndate-released: 2027-01-31\n"
    versions.write(repository, "2.0.0", DAY)
    assert versions.disagreements(repository) == []


def test_notes_are_collected_by_kind_above_the_last_version(repository: Path) -> None:
    changes = repository / "packages" / "dcp-b" / "changes"
    for name, text in (
        ("17.fixed.md", "`load` names\nthe rank.\n"),
        ("+resume.added.md", "`resume`.\n"),
        ("5.fixed.md", "Less memory.\n"),
    ):
        (changes / name).write_text(text)
    versions.write(repository, "0.2.0", DAY)
    assert len(change_notes.not_collected(repository)) == 5  # the notes, and a section for each package
    change_notes.collect(repository, "0.2.0", DAY)
    assert change_notes.not_collected(repository) == []
    before = "## 0.1.0 (2027-01-01)\n\nFirst version.\n"
    assert (repository / "packages/dcp-b/CHANGELOG.md").read_text() == (
        "# Changelog of dcp-b\n\n## 0.2.0 (2027-01-31)\n\n### Added\n\n- `resume`.\n\n"
        f"### Fixed\n\n- `load` names\n  the rank. (#17)\n- Less memory. (#5)\n\n{before}"
    )
    assert (repository / "packages/dcp-a/CHANGELOG.md").read_text() == (
        f"# Changelog of dcp-a\n\n## 0.2.0 (2027-01-31)\n\nNo changes.\n\n{before}"
    )


def test_a_section_begun_by_hand_is_kept_and_dated(repository: Path) -> None:
    changelog = repository / "packages" / "dcp-a" / "CHANGELOG.md"
    changelog.write_text("# Changelog of dcp-a\n\n## 0.1.0 (unreleased)\n\n- All of it.\n")
    (repository / "packages" / "dcp-a" / "changes" / "+ends.fixed.md").write_text("Ends.\n")
    assert [line for line in change_notes.not_collected(repository) if "must begin" in line]
    change_notes.collect(repository, "0.1.0", DAY)
    assert change_notes.not_collected(repository) == []
    assert changelog.read_text().endswith("## 0.1.0 (2027-01-31)\n\n- All of it.\n\n### Fixed\n\n- Ends.\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [("fixed.md", "x"), ("12.mended.md", "x"), ("about.fixed.md", "x"), ("12.fixed.txt", "x"), ("12.fixed.md", "\n")],
)
def test_a_note_that_would_be_lost_is_found(repository: Path, name: str, text: str) -> None:
    (repository / "packages" / "dcp-a" / "changes" / name).write_text(text)
    assert change_notes.misnamed(repository) == [f"packages/dcp-a/changes/{name}"]
    with pytest.raises(ValueError, match=re.escape(name)):
        change_notes.collect(repository, "0.2.0", DAY)
