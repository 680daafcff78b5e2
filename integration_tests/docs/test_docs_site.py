"""The site of the docs has every page and every public name, and links of the repository lead to the right place of it.

That the site builds without a warning is checked by building it: `nox -s docs`.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from docs_site import generated, reference
from docs_site.links import site_links, with_readme

ROOT = Path(__file__).resolve().parents[2]
PAGES = frozenset(
    {"async.md", "index.md", "packages/dcp-io.md", "decisions/index.md", "decisions/0001-x.md", "reference/hooks.md"}
)


def moved(text: str, here: str, broken: list[str] | None = None) -> str:
    found: list[str] = []
    result = site_links(text, here, pages=PAGES, repository=ROOT, broken=found.append)
    assert found == (broken or [])
    return result


@pytest.mark.parametrize(
    ("here", "link", "expected"),
    [
        ("index.md", "[a](async.md#deadlines)", "[a](async.md#deadlines)"),
        ("index.md", "[a](../packages/dcp-io/README.md)", "[a](packages/dcp-io.md)"),
        ("index.md", "[a](decisions/)", "[a](decisions/index.md)"),
        ("packages/dcp-io.md", "[a](../../docs/async.md)", "[a](../async.md)"),
        ("packages/dcp-io.md", "[a](../dcp-io)", "[a](dcp-io.md)"),
        ("decisions/0001-x.md", "[a](../async.md)", "[a](../async.md)"),
        ("reference/hooks.md", "[a](../async.md)", "[a](../async.md)"),
        ("index.md", "[a](../LICENSE)", "a"),
        ("index.md", "[a](https://example.org/x.md)", "[a](https://example.org/x.md)"),
        ("index.md", "```text\n[a](nowhere.md)\n```\n", "```text\n[a](nowhere.md)\n```\n"),
    ],
    ids=["anchor", "readme", "folder", "from-readme", "package", "decision", "made", "no-page", "elsewhere", "fenced"],
)
def test_links_of_the_repository_become_links_of_the_site(here: str, link: str, expected: str) -> None:
    assert moved(link, here) == expected


def test_a_link_that_leads_nowhere_is_told() -> None:
    moved("[a](nowhere.md)", "index.md", broken=["nowhere.md"])


def test_sections_of_the_readme_come_to_the_site() -> None:
    readme = "# x\n\n## Install\n\nSee [a](docs/a.md#b), [c](packages/c) and [d](#d).\n\n## Next\n"
    page = "before\n<!-- README: Install -->\nelsewhere\n<!-- end of README -->\nafter"
    found: list[str] = []
    expected = "before\nSee [a](a.md#b), [c](../packages/c) and [d](#d).\nafter"
    assert with_readme(page, readme, found.append) == expected
    with_readme(page.replace("Install", "Gone"), readme, found.append)
    assert found == ["Gone"]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(str(page) for page in pages if page.parts[0] != "decisions")


def test_every_package_has_its_pages() -> None:
    names = [folder.name for folder in generated.PACKAGES]
    assert [*generated.packages()] == [f"packages/{name}.md" for name in names]
    modules = {f"reference/{name.replace('-', '_')}.md" for name in names}
    assert {place for place in reference.pages() if place.count("/") == 1} == modules


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    text = "\n".join(reference.pages().values())
    anchors = {*re.findall(r"\{ #([\w.]+) \}", text), *re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    assert reference.missing_entries(anchors) == []


def test_a_public_name_without_an_entry_is_noticed() -> None:
    names = {f"dcp_io.{name}" for name in reference.public_names("dcp_io")}
    missing = reference.missing_entries(names - {"dcp_io.open_store"})
    assert [name for name in missing if name.startswith("dcp_io.")] == ["dcp_io.open_store"]


def test_the_build_counts_warnings() -> None:
    """With `--quiet` MkDocs makes no warnings at all, so that `--strict` has none to fail for."""
    (command,) = re.findall(r'"mkdocs", "build".*', (ROOT / "noxfile.py").read_text())
    assert '"--strict"' in command
    assert 'quiet"' not in command


def test_the_session_that_builds_the_site_runs_no_tests() -> None:
    text = (ROOT / "noxfile.py").read_text()
    bodies = {name: re.search(rf"def {name}\(.*?\n\n\n", text, re.DOTALL) for name in ("docs", "docs_tests")}
    runs = {name: body is not None and "integration_tests/docs" in body[0] for name, body in bodies.items()}
    assert runs == {"docs": False, "docs_tests": True}


def test_the_session_that_builds_the_site_can_break_long_signatures() -> None:
    """Without ruff or black, mkdocstrings leaves each signature on one line, whatever `line_length` says."""
    (tools,) = re.findall(r'"docs": \((.*)\)', (ROOT / "tools" / "environments.py").read_text())
    assert '"ruff"' in tools


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_pages_that_install_from_a_clone_say_how_to_get_it(page: str) -> None:
    text = (ROOT / page).read_text()
    assert 0 < text.index("git clone") < text.index("pip install ", text.index("git clone"))
    assert "REPOSITORY" in text


def test_the_site_links_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    mkdocs_config = pytest.importorskip("mkdocs.config", reason="nox -s docs installs MkDocs")
    from docs_site import events

    monkeypatch.setenv("DCP_REPOSITORY", "https://example.org/owner/dcp")
    config = events.on_config(mkdocs_config.load_config(str(ROOT / "mkdocs.yml")))
    assert (config.repo_url, config.repo_name) == ("https://example.org/owner/dcp", "dcp")


def test_what_another_package_describes_has_its_first_paragraph_too() -> None:
    page = reference.pages()["reference/dcp_manager.md"]
    entry = page.partition("### KeepBest ")[2].partition("\n###")[0]
    assert "metric" in entry
    assert "[`dcp_io.KeepBest`][dcp_io.KeepBest]" in entry


def test_what_most_users_look_for_comes_first() -> None:
    page = reference.pages()["reference/dcp_format.md"]
    assert page.index("::: dcp_format.convert\n") < page.index("::: dcp_format.WriteOptions")
    page = reference.pages()["reference/dcp_async.md"]
    assert page.index("::: dcp_async.async_save\n") < page.index("::: dcp_async.AsyncSaver\n")


def test_what_another_package_describes_is_a_link_to_it() -> None:
    assert "[`dcp_ranks.PeerOptions`][dcp_ranks.PeerOptions]" in reference.pages()["reference/dcp_core/classes.md"]


def test_the_mirror_tells_modules_from_names() -> None:
    page = reference.pages()["reference/dcp_all.md"]
    modules, _, others = page.partition("| --- | --- |")
    assert "`dcp_all.filesystem`" in modules
    assert "`run_command`{ #dcp_all.run_command } | [`dcp_inspect.run`][dcp_inspect.run]" in others
    assert "::: dcp_core.shards.boxes.CheckpointableTensor" in others  # of no package's public names


def test_what_most_look_for_comes_first() -> None:
    page = reference.pages()["reference/dcp_core.md"]
    entries = re.findall(r"^::: dcp_core\.([\w.]+)$", page, re.MULTILINE)
    assert entries[:3] == ["save", "load", "load_keys"]


def test_the_navigation_has_every_page_of_the_reference() -> None:
    places = [*reference.pages()]
    listed = [
        place
        for entry in reference.navigation(places)
        for place in ([entry] if isinstance(entry, str) else next(iter(entry.values())))
    ]
    assert sorted(listed) == sorted(places)


@pytest.mark.parametrize(
    "module", [f"{k}.{name}" for k, names in reference.BESIDE_THE_FRONT_DOOR.items() for name in names]
)
def test_modules_beside_the_front_door_exist(module: str) -> None:
    assert importlib.import_module(module).__doc__


def test_every_hook_that_registers_is_in_the_table_of_what_is_offered() -> None:
    from dcp_base.hookspecs import HookSpecs

    assert {*generated.HOOK_TABLES.values()} == {name for name in vars(HookSpecs) if name.startswith("dcp_register_")}
    page = generated.hooks()["reference/hooks.md"]
    assert "`stream.zstd`" in page
    assert "`s3`" in page


def test_every_command_has_its_options() -> None:
    from dcp_inspect.cli import COMMANDS

    page = generated.command()["reference/command.md"]
    assert [name for name in COMMANDS if f"## dcp {name}\n" not in page] == []
    assert "--world INTEGER RANGE" in page
    assert "-h, --help" in page
