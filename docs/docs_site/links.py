"""Where a link of a page leads on the site.

Pages are written to be read in the repository as well: their links lead to READMEs, folders and files. Nothing here
knows MkDocs.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Container
from pathlib import Path

__all__ = ["site_links", "with_readme"]

_LINK = re.compile(
    r"(?P<fence>^```.*?^```$)|(?<!!)\[(?P<text>[^\]\[]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.MULTILINE | re.DOTALL,
)
_FROM_README = re.compile(r"<!-- README: (.+?) -->.*?<!-- end of README -->", re.DOTALL)


def site_links(
    markdown: str, here: str, *, pages: Container[str], repository: Path, broken: Callable[[str], object]
) -> str:
    """The text of a page with links that lead to where things are on the site.

    A link to a file of the repository that has no page becomes its text.

    Args:
        markdown: Text of the page.
        here: Place of the page on the site, such as `packages/dcp-core.md`.
        pages: Places of all pages and pictures.
        repository: Its root.
        broken: Called with each target that is neither on the site nor in the repository.
    """

    def moved(found: re.Match[str]) -> str:
        target = found["target"]
        if found["fence"] or target is None or "://" in target:
            return found[0]
        place = _place(here, target)
        if place in pages:
            relative = posixpath.relpath(place, posixpath.dirname(here) or ".")
            return f"[{found['text']}]({relative}{found['anchor'] or ''})"
        if (repository / _in_repository(here, target)).exists():
            return found["text"]
        broken(target)
        return found[0]

    return _LINK.sub(moved, markdown)


def with_readme(markdown: str, readme: str, broken: Callable[[str], object]) -> str:
    """The text of a page of `docs/` with sections of the README where it asks for them.

    They replace what is between `<!-- README: TITLE -->` and `<!-- end of README -->`: in the repository, a link.

    Args:
        markdown: Text of the page.
        readme: That of the repository's README.
        broken: Called with each title that the README does not have.
    """

    def section(found: re.Match[str]) -> str:
        inside = re.search(rf"^## {re.escape(found[1])}\n(.*?)(?=^## |\Z)", readme, re.MULTILINE | re.DOTALL)
        if inside is None:
            broken(found[1])
            return found[0]
        return re.sub(r"\]\((?!\w+:|#|docs/)", "](../", inside[1].strip()).replace("](docs/", "](")

    return _FROM_README.sub(section, markdown)


def _in_repository(here: str, target: str) -> str:
    """The path in the repository of what a page links to."""
    source = f"{here.removesuffix('.md')}/README.md" if here.startswith("packages/") else f"docs/{here}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _place(here: str, target: str) -> str:
    """The place on the site of what a page links to, if it is there."""
    if here.startswith("reference/") or here == "decisions/index.md":  # made for the site
        return posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    path = _in_repository(here, target)
    package = re.fullmatch(r"packages/([\w-]+)(/README\.md)?", path)
    if package:
        return f"packages/{package[1]}.md"
    inside = path.removeprefix("docs/")
    return f"{inside}/index.md" if inside == "decisions" else inside
