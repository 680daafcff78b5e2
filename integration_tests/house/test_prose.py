"""Docs and docstrings are plain English: phrasings that make a reader go back are rare.

The count finds habits, it does not prove clarity. Other libraries have between 0.4 and 1.9 per 1,000 words.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_PER_THOUSAND = 2.0
MOST_WORDS_IN_DOCS = 45_000
# Phrasing → its pattern. Words of a field are no habits: `at once` is one, `immediately` is not.
HABITS = {
    "a relative clause as subject": r"(?:(?<=[.:;] )|^)(?:What|Whoever|Whatever|Who|Where) (?:\w+ ){1,9}?"
    r"(?:is|are|has|have|was|were|does|do|can|must|may)\b(?![^.?!]*\?)",
    "that of the …": r"\b(?:that|those) of (?:a|an|the|its|their|our|another|others?|each|all|both|one)\b",
    "whose": r"\b(?:whose|of which|of whom)\b",
    "is no …": r"\b(?:is|are|was|were|has|have) no (?!longer\b|more\b)",
    "an adverb behind": r"(?:, too| as well| also)[.;:]",
    "beside": r"\bbeside\b",
    "of each …": r"\bof (?:each|every)\b",
    "one after the other": r"\b(?:one|each) (?:after|by) (?:the other|one)\b",
    "an odd word": r"\b(?:anew|whoever|nobody|somebody|is told|are told|lets? go of|of its own|at once|alike|meanwhile|"
    r"thereof|unasked|owed|heard of|put aside|by then|in its place|gives? up|comes? (?:along|last|first)|made out|"
    r"mend\w*)\b",
}
PATTERNS = {name: re.compile(pattern, re.MULTILINE) for name, pattern in HABITS.items()}


def plain(text: str) -> str:
    """The sentences of a text: no code, tables, headings or comments."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "X", text)
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("|", "    ", "<", "#")))


def docstrings(path: Path) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))
    return "\n".join(plain(text) for node in nodes if (text := ast.get_docstring(node)))


@functools.cache
def pages() -> dict[str, str]:
    paths = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *ROOT.glob("packages/*/README.md")]
    kept = (path for path in paths if "decisions" not in path.parts)
    return {str(path.relative_to(ROOT)): plain(path.read_text()) for path in kept}


@functools.cache
def sources() -> dict[str, str]:
    paths = (path for path in ROOT.glob("packages/*/src/**/*.py") if "testing" not in path.parts)
    return {str(path.relative_to(ROOT)): docstrings(path) for path in paths}


def words(text: str) -> int:
    return len(re.findall(r"[A-Za-z]+", text))


@pytest.mark.parametrize("texts", [pages, sources], ids=["docs", "docstrings"])
def test_prose_has_few_phrasings_that_make_a_reader_go_back(texts) -> None:
    read = texts()
    found = {
        name: [f"{path}: {match[0]!r}" for path, text in read.items() for match in pattern.finditer(text)]
        for name, pattern in PATTERNS.items()
    }
    count = sum(map(len, found.values()))
    total = sum(map(words, read.values()))
    assert total > 10_000, "few words found: the test looks in the wrong place"
    worst = {name: hits[:5] for name, hits in found.items() if hits}
    assert 1000 * count / total <= MOST_PER_THOUSAND, worst


def habits(text: str) -> list[str]:
    return [match[0] for pattern in PATTERNS.values() for match in pattern.finditer(text)]


def test_prose_of_no_page_and_no_package_is_worse() -> None:
    """The average hides a bad page. A text of few words may have one habit."""
    texts = {**pages()}
    for path, text in sources().items():
        package = path.split("/src/")[0]
        texts[package] = f"{texts.get(package, '')}\n{text}"
    most = {name: max(1.0, MOST_PER_THOUSAND * words(text) / 1000) for name, text in texts.items()}
    assert {name: found for name, text in texts.items() if len(found := habits(text)) > most[name]} == {}


def test_prose_of_the_docs_is_short() -> None:
    assert sum(map(words, pages().values())) <= MOST_WORDS_IN_DOCS


def test_prose_patterns_find_what_they_are_for() -> None:
    text = "What is lost is told to nobody. It is no path, and the name of each rank, too."
    assert {name for name, pattern in PATTERNS.items() if pattern.search(text)} == {
        *("a relative clause as subject", "is no …", "an odd word", "of each …", "an adverb behind"),
    }
