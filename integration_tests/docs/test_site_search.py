"""The check that the site's search finds what readers look for: what it accepts, and what it notices.

The questions themselves are asked of the whole site when it is built: `nox -s docs`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from docs_site import generated, reference, search

DOCS = Path(__file__).resolve().parents[2] / "docs"


def index(*sections: dict[str, Any]) -> dict[str, Any]:
    """An index as the site has it: `search/search_index.json`."""
    fields = {"title": {"boost": 1000.0}, "text": {"boost": 1.0}, "tags": {"boost": 1000000.0}}
    return {"config": {"fields": fields}, "docs": list(sections)}


def section(location: str, title: str, text: str = "", **more: Any) -> dict[str, Any]:
    return {"location": location, "title": title, "text": f"<p>{text}</p>", **more}


INDEX = index(
    section("reference/a.html#save", "save", "Saves a state dict.", boost=0.2),
    section("storage.html", "Storage by URI", "Buckets and folders.", boost=2, tags=["save to S3"]),
    section("formats.html", "Formats", "save, convert, <code>safetensors</code>", boost=2),
    section("formats.html#convert", "Convert", "save", boost=2),
    section("cost.html", "What does it cost?", "Nothing.", boost=2),
    section("x.html", "save", "save"),
    section("y.html", "save", "save"),
)


@pytest.mark.parametrize(
    ("question", "first"),
    [("save to S3", "storage.html"), ("safetensor", "formats.html"), ("COST", "cost.html")],
    ids=["words of a page", "the beginning of a word", "any case"],
)
def test_pages_are_found(question: str, first: str) -> None:
    site_search = pytest.importorskip("docs_site.site_search", reason="nox -s docs installs lunr")
    assert site_search.SiteSearch(INDEX).pages(question)[0] == first


def test_sections_of_one_page_are_one_result() -> None:
    site_search = pytest.importorskip("docs_site.site_search", reason="nox -s docs installs lunr")
    assert site_search.SiteSearch(INDEX).pages("convert") == ["formats.html"]


def test_a_question_that_does_not_find_its_page_is_noticed() -> None:
    site_search = pytest.importorskip("docs_site.site_search", reason="nox -s docs installs lunr")
    questions = {"save": ("reference/a.md",), "cost": ("cost.md",), "overhead": ("cost.md",)}
    assert [problem.partition(" does")[0] for problem in site_search.unanswered(INDEX, questions)] == [
        "'save'",
        "'overhead'",
    ]


def test_there_are_enough_questions_and_their_pages_exist() -> None:
    assert len(search.QUESTIONS) >= 55
    named = {*search.WORDS, *(page for pages in search.QUESTIONS.values() for page in pages)}
    assert [page for page in sorted(named) if not (DOCS / page).exists()] == []


def test_guides_count_more_than_what_is_generated() -> None:
    made = [*reference.pages(), *generated.packages(), *generated.decisions()]
    assert max(map(search.boost_of, made)) < search.boost_of("storage.md")
