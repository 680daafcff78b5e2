"""Search of the built site, as its reader's browser does it: whether questions find their pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lunr import get_default_builder, tokenizer
from lunr.index import Index
from lunr.stop_word_filter import WORDS as STOP_WORDS

from docs_site.search import QUESTIONS

__all__ = ["SiteSearch", "unanswered"]

FIRST = 3
"""Results that a reader looks at."""


def unanswered(index: Mapping[str, Any], questions: Mapping[str, Sequence[str]] = QUESTIONS) -> list[str]:
    """The questions whose page is not among the first results, with what is there instead.

    Args:
        index: Content of the site's `search_index.json`.
        questions: What a reader types → the pages of which one must be among the first three.
    """
    search = SiteSearch(index)
    missed = []
    for question, pages in questions.items():
        found = search.pages(question)[:FIRST]
        if not {page.removesuffix(".md") + ".html" for page in pages}.intersection(found):
            missed.append(f"{question!r} does not find {' or '.join(pages)}, but {', '.join(found) or 'nothing'}")
    return missed


class SiteSearch:
    """What Material's search worker (`search.*.min.js`) does, as far as it matters for the order of the results.

    Args:
        content: Of the site's `search_index.json`.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        config, sections = content["config"], content["docs"]
        builder = get_default_builder()
        builder.pipeline.reset()  # its filter of stop words changes little, as words of a question are prefixes
        builder.search_pipeline.reset()
        builder.ref("location")
        builder.b(0)
        for field, options in config["fields"].items():
            builder.field(field, boost=options["boost"])
        for section in sections:
            words = {field: _words(section.get(field, "")) for field in config["fields"]}
            boost = section.get("boost", 1)
            builder.add({"location": section["location"], **words}, {"boost": boost})
        self._index: Index = builder.build()

    def pages(self, question: str) -> list[str]:
        """The pages that are shown for a question, best first."""
        words = [word for word in re.split(r"[\s\-]+", question.lower()) if word]
        # Not by `word*`: lunr's set of tokens then expands to tokens of code that no page has, and fails.
        known = [term for term in self._index.inverted_index if "*" not in term and term.startswith(tuple(words))]
        query = self._index.create_query()
        for term in known:
            query.term(term, use_pipeline=False)
        results = self._index.query(query) if known else []
        scored = []
        for result in results:
            matched = result["match_data"].metadata
            found = {word: any(term.startswith(word) for term in matched) for word in words}
            counted = [hit for word, hit in found.items() if hit or word not in STOP_WORDS]
            rank = ("#" not in result["ref"]) + sum(counted) / len(counted)
            scored.append((result["score"] * (1 + rank**2), result["ref"].partition("#")[0]))
        return list(dict.fromkeys(page for _, page in sorted(scored, reverse=True, key=lambda each: each[0])))


def _words(text: str | Sequence[str]) -> list[str]:
    """What is searched of a field: the text between elements, in words."""
    joined = text if isinstance(text, str) else " ".join(text)
    return [str(token) for token in tokenizer.Tokenizer(re.sub(r"<[^>]*>", " ", joined))]
