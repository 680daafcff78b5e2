"""Check commit messages: `area: imperative summary` in at most 72 characters, then an empty line, and why.

`commit_message.py FILE` checks one message, as git's hook passes it; `commit_message.py --range A..B` checks commits.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

_SUBJECT = re.compile(r"[a-z][a-z0-9_.,/ -]*: \S.*")
_MOST_CHARACTERS = 72


def problems(message: str) -> list[str]:
    """Return what is wrong with a message, as sentences."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject, *rest = lines or [""]
    if re.match(r"(Merge|Revert|fixup!|squash!) ?", subject):
        return []
    found = []
    if not _SUBJECT.fullmatch(subject):
        found.append(f"the subject is not `area: summary`: {subject!r}")
    if len(subject) > _MOST_CHARACTERS:
        found.append(f"the subject has {len(subject)} characters, not at most {_MOST_CHARACTERS}: {subject!r}")
    if subject.endswith("."):
        found.append(f"the subject ends with a full stop: {subject!r}")
    if not any(line.strip() for line in rest):
        found.append(f"there is no body that says why: {subject!r}")
    elif rest[0].strip():
        found.append(f"there is no empty line after the subject: {subject!r}")
    return found


def _messages(arguments: list[str]) -> list[str]:
    if arguments[0] != "--range":
        return [Path(arguments[0]).read_text()]
    log = ("git", "log", "--no-merges", "--format=%B%x00", arguments[1])
    return [each.strip() for each in subprocess.run(log, check=True, capture_output=True, text=True).stdout.split("\0")]


if __name__ == "__main__":
    wrong = [problem for message in _messages(sys.argv[1:]) if message for problem in problems(message)]
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(bool(wrong))
