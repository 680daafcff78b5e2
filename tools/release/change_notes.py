"""Change notes: a file for each change in `packages/NAME/changes`, which a release collects in `CHANGELOG.md`.

How to write one is in `docs/development/change-notes.md`.
"""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path

HEADINGS = {
    "breaking": "Breaking",
    "added": "Added",
    "changed": "Changed",
    "fixed": "Fixed",
    "security": "Security",
}
"""Kind of change, in the order of a changelog → its heading."""
_NAME = re.compile(rf"(?P<about>\d+|\+[a-z0-9-]+)\.(?P<kind>{'|'.join(HEADINGS)})\.md")
_SECTION = re.compile(r"^## (\d+\.\d+\.\d+)(?: \((.*)\))?$", re.MULTILINE)


def misnamed(root: Path) -> list[str]:
    """Files among the change notes that no release would collect."""
    found = [path for path in root.glob("packages/*/changes/**/*") if path.is_file()]
    return sorted(
        str(path.relative_to(root))
        for path in found
        if not _NAME.fullmatch(path.name) or path.parent.name != "changes" or not path.read_text().strip()
    )


def not_collected(root: Path) -> list[str]:
    """What keeps the changelogs from being those of a release: notes still apart, or a section without its date."""
    waiting = [f"{path.relative_to(root)} is not in CHANGELOG.md" for path in sorted(root.glob("packages/*/changes/*"))]
    for folder in _packages(root):
        version = _version(folder)
        section = _SECTION.search((folder / "CHANGELOG.md").read_text())
        if section is None or section[1] != version or not re.fullmatch(r"[\d-]{10}", section[2] or ""):
            waiting.append(f"{folder.name}/CHANGELOG.md must begin with `## {version} (date of the release)`")
    return waiting


def collect(root: Path, version: str, day: dt.date) -> None:
    """Move the notes of each package into the section of a version, made if it is not there, and date it.

    Raises:
        ValueError: A file is misnamed or empty; nothing has changed.
    """
    if wrong := misnamed(root):
        raise ValueError(f"no change notes: {', '.join(wrong)}; see docs/development/change-notes.md")
    for folder in _packages(root):
        changelog = folder / "CHANGELOG.md"
        changelog.write_text(_with_section(changelog.read_text(), version, day, _lines(folder)))
        for path in folder.glob("changes/*"):
            path.unlink()
        if (folder / "changes").exists():
            (folder / "changes").rmdir()


def _with_section(changelog: str, version: str, day: dt.date, notes: str) -> str:
    title, *sections = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)
    heading = f"## {version} ({day})"
    if sections and sections[0].split()[1] == version:  # begun by hand
        body = sections.pop(0).partition("\n")[2].strip()
        notes = f"{body}\n\n{notes}".strip()
    section = f"{heading}\n\n{notes or 'No changes.'}\n"
    return title + "\n".join([section, *sections])


def _lines(folder: Path) -> str:
    """The notes of a package as a changelog shows them: below a heading for each kind."""
    notes: dict[str, list[str]] = {kind: [] for kind in HEADINGS}
    for path in sorted(folder.glob("changes/*")):
        if named := _NAME.fullmatch(path.name):
            number = f" (#{named['about']})" if named["about"].isdigit() else ""
            notes[named["kind"]].append(f"- {path.read_text().strip()}{number}".replace("\n", "\n  "))
    return "\n\n".join(f"### {HEADINGS[kind]}\n\n" + "\n".join(lines) for kind, lines in notes.items() if lines)


def _packages(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))


def _version(folder: Path) -> str:
    found = re.search(r'^version = "(.*)"$', (folder / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else ""
