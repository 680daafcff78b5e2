"""What MkDocs calls while it builds the site: generated pages join it, and links are led to where things are there.

Warnings given here fail `mkdocs build --strict`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.extend(map(str, Path(__file__).resolve().parents[1:3]))  # MkDocs loads this file by its path
from docs_site import generated, reference, search
from docs_site.links import site_links, with_readme
from tools.release.staged import repository_address

_log = get_plugin_logger("docs_site")
_REMOTE = re.compile(r"<(?:script|img|iframe)[^>]* src=[\"']?https?:[^>]*>|<link[^>]* href=[\"']?https?:[^>]*>")
_ANCHOR = re.compile(r' id="([^"]+)"')
_OPTION = re.compile(r"<code>(--[a-z][a-z-]*)</code>")
_UNRESOLVED = re.compile(r"\]\[(?:<code>)?[\w.]*(?:</code>)?\]")
_made: dict[str, str] = {}
_anchors: set[str] = set()


@event_priority(100)  # before mkdocstrings looks at its options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the generated pages, put them into the navigation, and say where the sources and the repository are."""
    if address := repository_address(generated.ROOT):
        config.repo_url, config.repo_name = address, address.rpartition("/")[2]
    _made.clear()
    _anchors.clear()
    for make in (generated.packages, reference.pages, generated.hooks, generated.command, generated.decisions):
        _made.update(make())
    nav = config.nav or []
    first = ["reference/command.md", "reference/hooks.md"]
    apis = [place for place in _places("reference/") if place not in first]
    _section(nav, "Reference").extend([*first, *reference.navigation(apis)])
    _section(nav, "Packages").extend(_places("packages/"))
    written = sorted(Path(config.docs_dir, "decisions").glob("*.md"))
    _section(nav, "Decisions").extend(["decisions/index.md", *(f"decisions/{path.name}" for path in written)])
    sources = [str(folder / "src") for folder in generated.PACKAGES]
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = sources
    return config


def _places(folder: str) -> list[str]:
    return sorted(place for place in _made if place.startswith(folder))


def _section(nav: list[Any], name: str) -> list[Any]:
    """The list of pages of a section of the navigation."""
    pages: list[Any]
    for entry in nav:
        if isinstance(entry, dict) and name in entry:
            pages = entry[name]
            return pages
    raise KeyError(f"mkdocs.yml: nav has no section {name!r}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for place, text in _made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where things are on the site, and say how the page is found."""
    del config
    here = page.file.src_uri
    page.meta["search"] = {"boost": search.boost_of(here)}
    page.meta["tags"] = [*search.WORDS.get(here, ())]

    def broken(target: str) -> None:
        _log.warning("%s: a link leads to %r, which is not there", here, target)

    if here == "index.md":
        markdown = with_readme(markdown, (generated.ROOT / "README.md").read_text(), broken)
    return site_links(markdown, here, pages=files.src_uris, repository=generated.ROOT, broken=broken)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """See that a browser fetches nothing from elsewhere when it shows a page, and that references are links.

    Names of options stay in one line: a browser would break them after their dashes.
    """
    del config
    output = _OPTION.sub(r'<code style="white-space: nowrap">\1</code>', output)
    here = page.file.src_uri
    for element in _REMOTE.findall(output):
        _log.warning("%s: fetched from elsewhere when the page is looked at: %s", here, element)
    if here.startswith("reference/"):
        _anchors.update(_ANCHOR.findall(output))
        for found in _UNRESOLVED.findall(output):
            _log.warning("%s: a reference that is no link: %s", here, found)
    return output


@event_priority(-100)  # when the index of the search is written
def on_post_build(config: MkDocsConfig) -> None:
    """See that the reference has every public name, and that the search finds what readers look for."""
    from docs_site.site_search import unanswered  # noqa: PLC0415 - needs lunr, which only builds of the site need

    for name in reference.missing_entries(_anchors):
        _log.warning("reference: %s is in __all__, and has no entry", name)
    for problem in unanswered(json.loads(Path(config.site_dir, "search", "search_index.json").read_text())):
        _log.warning("search: %s", problem)
