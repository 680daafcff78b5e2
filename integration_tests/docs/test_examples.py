"""The scripts in `docs/examples` run as their first lines say, twice, and the notebook's cells run in order."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration_tests.docs.page_scripts import PageScripts

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
RUN = re.compile(r"^Run: (?:python|torchrun --nproc-per-node (\d)) ([\w.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def page_scripts() -> Iterator[PageScripts]:
    with PageScripts() as scripts:
        yield scripts


def run(page_scripts: PageScripts, script: Path, ranks: int) -> str:
    statuses, output = page_scripts.run(script, ranks)
    assert statuses == [0] * ranks, output
    return output


def run_as_said(page_scripts: PageScripts, script: Path) -> str:
    said = RUN.search(script.read_text())
    assert said, "the first lines do not say how to run it"
    assert said[2] == script.name
    return run(page_scripts, script, int(said[1] or 1))


@pytest.fixture(scope="module")
def fsdp2_run(tmp_path_factory: pytest.TempPathFactory, page_scripts: PageScripts) -> Path:
    folder = tmp_path_factory.mktemp("fsdp2")
    run_as_said(page_scripts, Path(shutil.copy(EXAMPLES / "fsdp2.py", folder)))
    return folder / "fsdp2-run"


@pytest.mark.docs
def test_a_sharded_run_goes_on_with_other_ranks(fsdp2_run: Path, page_scripts: PageScripts) -> None:
    assert "step 10, saved by 3 ranks" in run(page_scripts, fsdp2_run.parent / "fsdp2.py", 3)


# The other two have tests of their own: below, and in integration_tests/memory.
ALONE = [path for path in SCRIPTS if path.stem not in ("fsdp2", "elastic_memory")]


@pytest.mark.docs
@pytest.mark.parametrize("script", ALONE, ids=[path.stem for path in ALONE])
def test_scripts_run_as_they_say_and_once_more(script: Path, tmp_path: Path, page_scripts: PageScripts) -> None:
    copied = Path(shutil.copy(script, tmp_path))
    first = run_as_said(page_scripts, copied)
    assert first.strip()
    again = run(page_scripts, copied, 1)
    assert again.startswith(first)  # they append to one file
    assert len(again) > len(first)


@pytest.mark.docs
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_cells_of_notebooks_run_in_order(
    notebook: Path, fsdp2_run: Path, tmp_path: Path, page_scripts: PageScripts
) -> None:
    shutil.copytree(fsdp2_run, tmp_path / "fsdp2-run")  # which the reader makes in a terminal
    cells = json.loads(notebook.read_text())["cells"]
    script = tmp_path / "cells.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))
    assert "weight" in run(page_scripts, script, 1)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebooks_are_kept_without_output(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_every_example_is_on_the_page() -> None:
    page = (EXAMPLES.parent / "examples.md").read_text()
    assert [path.name for path in (*SCRIPTS, *NOTEBOOKS) if f"](examples/{path.name})" not in page] == []
