"""README and docs tell the truth: code blocks run, links lead somewhere, named sessions and hooks exist.

Every `python` block of a page runs, in order, as one script, in an empty folder, with warnings as errors. A script
that joins a process group runs on two ranks, as torchrun would start it; for one page torchrun does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.benchmarks.figures import faster
from integration_tests.docs import disk_and_time
from integration_tests.docs.page_scripts import PageScripts
from tools.diagrams import DIAGRAMS, IMAGES

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
SESSION = re.compile(r"nox -s ([\w()-]+)")


def blocks(page: Path, *languages: str) -> list[str]:
    return [code for language, code in BLOCK.findall(page.read_text()) if language in languages]


def named(pages: list[Path]) -> list[object]:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture(scope="module")
def page_scripts() -> Iterator[PageScripts]:
    with PageScripts() as scripts:
        yield scripts


def script_of(page: Path, folder: Path) -> tuple[Path, int]:
    """The blocks of a page as a script, and on how many ranks it runs."""
    script = folder / "script.py"
    code = "\n".join(blocks(page, "python"))
    script.write_text(code)
    return script, 2 if "init_process_group" in code else 1


def runnable() -> Iterator[object]:
    """The pages with scripts; one of them has system calls traced."""
    for page in PAGES:
        if code := "".join(blocks(page, "python")):
            marks = [pytest.mark.traced] if "run_traced" in code else []
            yield pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.docs
@pytest.mark.parametrize("page", list(runnable()))
def test_code_blocks_run(page: Path, tmp_path: Path, page_scripts: PageScripts) -> None:
    script, ranks = script_of(page, tmp_path)
    statuses, output = page_scripts.run(script, ranks)
    assert statuses == [0] * ranks, output


@pytest.mark.slow  # its code blocks run in every case
def test_the_quickstart_runs_as_it_says(tmp_path: Path) -> None:
    script, ranks = script_of(ROOT / "docs" / "quickstart.md", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.docs
@pytest.mark.parametrize("version", ["1.28.0", "1.37.0"])
def test_the_manifests_fit_the_schema_of_kubernetes(version: str) -> None:
    reason = "nox -s docs_tests installs kubernetes-validate, 108 MB of schemas"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_names_and_times_of_the_manifests_fit_together() -> None:
    job, service = manifests()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    first = f"{job['metadata']['name']}-0.{pod['subdomain']}"  # the host name of the first pod
    assert any(option.startswith(f"--rdzv-endpoint={first}:") for option in container["command"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (shutdown,) = (int(each.partition("=")[2]) for each in container["command"] if "shutdown-timeout" in each)
    (script,) = blocks(ROOT / "docs" / "cluster.md", "python")
    preemption = int(re.findall(r"preemption_timeout_seconds=(\d+)", script)[0])
    assert preemption < shutdown < pod["terminationGracePeriodSeconds"]


def manifests() -> list[dict[str, Any]]:
    """The Kubernetes Job and Service of the page about clusters."""
    yaml = pytest.importorskip("yaml")
    (text,) = blocks(ROOT / "docs" / "cluster.md", "yaml")
    return [*yaml.safe_load_all(text)]


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead, as GitHub and the site name its headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", named(PAGES))
def test_links_lead_to_headings_that_exist(page: Path) -> None:
    text = page.read_text()
    within = re.findall(r"\[[^\]]*\]\(([^)#\s:]*)#([^)\s]+)\)", text)
    targets = [(page.parent / path if path else page, anchor) for path, anchor in within]
    assert [(str(path), anchor) for path, anchor in targets if anchor not in anchors(path)] == []


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
    from dcp_base import hookspecs

    page = (ROOT / "docs" / "hooks.md").read_text()
    hooks = {name for name in vars(hookspecs.HookSpecs) if name.startswith("dcp_")}
    assert hooks, "no hook found: the test looks in the wrong place"
    assert {name for name in hooks if f"`{name}`" not in page} == set()


def saying(text: str) -> Callable[[float], str]:
    return lambda ratio: text.format(faster(ratio))


# (page, column of its table, line of its table, what the README says)
FIGURES = [
    ("benchmarks.md", 3, "the same ÷ best stock setting", saying("| save 1 GiB to a disk, with fsync | {} |")),
    ("benchmarks.md", 3, "load 1 GiB warm (disk) ÷ stock", saying("| load it, every byte checked | {} |")),
    ("benchmarks.md", 3, "20,000 scalars, save ÷ best stock setting", saying("| save, load 20,000 scalars | {}, ")),
    ("benchmarks.md", 3, "20,000 scalars, load ÷ stock", saying(", {} | baseline | same |")),
    (
        "benchmarks.md",
        3,
        "bytes read ÷ needed, rows (16 MiB in one piece), verified",
        "| bytes that 4 ranks, sharded by rows, read in total from a checkpoint that 1 rank saved "
        "| {:.2f} × its size | ".format,
    ),
    (
        "async.md",
        2,
        "lost training time ÷ stock's (process)",
        lambda ratio: (
            "| training time lost while a separate process saves | " + faster(ratio).replace("faster", "less")
        ),
    ),
]


@pytest.mark.parametrize(("page", "column", "target", "said"), FIGURES, ids=[figure[2] for figure in FIGURES])
def test_figures_of_the_readme_are_those_of_the_pages(
    page: str, column: int, target: str, said: Callable[[float], str]
) -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / page).read_text().splitlines()]
    found = [row for row in rows if row[0] == f"| {target}"]
    assert found, f"docs/{page} has no line {target!r}"
    assert said(float(found[0][column - 1])) in (ROOT / "README.md").read_text()


def test_figures_of_compression_in_the_readme_are_those_of_its_page() -> None:
    page = (ROOT / "docs" / "compression.md").read_text()
    ours, theirs = (
        re.search(rf"^\| MiniLM, bf16 \| {codec} \| ([\d.]+) \|", page, re.MULTILINE)
        for codec in ("auto", "stock's zstd")
    )
    assert ours
    assert theirs
    line = '| size of bf16 weights (MiniLM) with `compression="auto"`: lossless, and slices can be read '
    assert f"{line}| {float(ours[1]):.2f} × | {float(theirs[1]):.2f} ×, " in (ROOT / "README.md").read_text()


def test_sizes_of_models_are_those_of_estimate() -> None:
    assert "\n".join(disk_and_time.table()) in disk_and_time.PAGE.read_text()


def needed_packages(package: str) -> set[str]:
    """A package, and those of this repository that it is built on."""
    declared = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]["dependencies"]
    direct = {re.split(r"[^\w-]", line)[0] for line in declared if line.startswith("dcp-")}
    return {package}.union(*map(needed_packages, direct))


@pytest.mark.parametrize("package", sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")))
def test_install_lines_name_all_that_a_package_needs(package: str) -> None:
    lines = re.findall(
        r"^pip install (.*packages/.*?)(?: +#.*)?$",
        (ROOT / f"packages/{package}/README.md").read_text().replace("\\\n", ""),
        re.MULTILINE,
    )
    assert lines, "the README does not say how to install the package from a clone"
    folders = {each.rstrip("/") for each in lines[0].split() if each.startswith("packages/")}
    assert folders == {"packages/*"} or folders >= {f"packages/{name}" for name in needed_packages(package)}


def test_the_plugin_page_shows_the_package() -> None:
    package = ROOT / "integration_tests" / "plugins" / "dcp-acme"
    page = (ROOT / "docs" / "write-a-plugin.md").read_text()
    shown = dict(
        re.findall(r"^`((?:src/dcp_acme|tests)/\w+\.py)`:\n\n```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    )
    modules = {f"src/dcp_acme/{path.name}" for path in package.glob("src/dcp_acme/*.py")}
    assert shown.keys() == modules | {"tests/conftest.py", "tests/test_conformance.py"}
    assert [name for name, code in shown.items() if code != (package / name).read_text()] == []
    (settings,) = map(tomllib.loads, blocks(ROOT / "docs" / "write-a-plugin.md", "toml"))
    actual = tomllib.loads((package / "pyproject.toml").read_text())
    del actual["tool"]["ruff"], actual["project"]["classifiers"]  # of this repository's, not of a reader's
    assert settings == actual


def test_code_of_the_pages_fits() -> None:
    """88 columns are what a page shows without scrolling on a screen of 1280 pixels."""
    wide = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for _, code in BLOCK.findall(page.read_text())
        for line in code.splitlines()
        if len(line) > 88
    ]
    assert wide == []


@pytest.mark.parametrize("name", DIAGRAMS)
def test_diagrams_are_what_their_module_draws(name: str) -> None:
    """And none of their words is cut off on the right, at an average width of half the height of a letter."""
    drawn = str(DIAGRAMS[name]())
    assert (IMAGES / f"{name}.svg").read_text(encoding="utf-8") == drawn, "python -m tools.diagrams writes it"
    for kind, x, words in re.findall(r'<text class="([^"]*)" x="([\d.]+)"[^>]*>([^<]+)<', drawn):
        share = 0.5 if "mid" in kind else 0 if "end" in kind else 1
        assert float(x) + share * 6.5 * len(words) <= 400, words
