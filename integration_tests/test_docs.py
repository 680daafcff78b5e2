"""README and docs tell the truth: code blocks run, links lead somewhere, named sessions and hooks exist.

Every `python` block of a page runs, in order, as one script, in an empty folder, with warnings as errors. A script
that joins a process group is started as the page says it is: by torchrun, here on two ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
SESSION = re.compile(r"nox -s ([\w()-]+)")


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if blocks(page, "python")]))
def test_code_blocks_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    code = "\n".join(blocks(page, "python"))
    script.write_text(code)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *(launcher if "init_process_group" in code else []), str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", named(PAGES))
def test_named_sessions_exist(page: Path) -> None:
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    unknown = {name.split("(")[0] for name in SESSION.findall(page.read_text())} - sessions
    assert unknown == set()


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_every_hook_is_documented() -> None:
    from dcp_core import hookspecs

    page = (ROOT / "docs" / "hooks.md").read_text()
    hooks = {name for name in vars(hookspecs.HookSpecs) if name.startswith("dcp_")}
    assert hooks, "no hook found: the test looks in the wrong place"
    assert {name for name in hooks if f"`{name}`" not in page} == set()


def test_the_plugin_page_shows_the_package() -> None:
    package = ROOT / "integration_tests" / "plugins" / "dcp-acme"
    page = (ROOT / "docs" / "write-a-plugin.md").read_text()
    shown = re.findall(
        r"^`(src/dcp_acme/\w+\.py|tests/\w+\.py)`:\n\n```py(?:thon)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )
    modules = {f"src/dcp_acme/{path.name}" for path in package.glob("src/dcp_acme/*.py")} - {"src/dcp_acme/__init__.py"}
    assert {name for name, _ in shown} == modules | {"tests/test_conformance.py"}
    assert [name for name, code in shown if code not in (package / name).read_text()] == []
    (points,) = blocks(ROOT / "docs" / "write-a-plugin.md", "toml")
    assert points in (package / "pyproject.toml").read_text()
