"""The repository keeps its own rules: the ones that no linter checks."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests.call_paths.sources import borrowed_names, read_modules
from tools.release import change_notes, versions

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
# dcp_all has a module for each of PyTorch's, under the same names.
FOLDERS = sorted({path.parent for path in SOURCES if not {"testing", "dcp_all"} & {*path.parts}})
NEWER_MODULES = {"compression"}  # of the standard library, from Python 3.14 on
TENSOR_FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "range", "scalar_tensor", "tensor", "zeros"),
}
IMPORTED_AS = {"opentelemetry_api": "opentelemetry"}  # distribution → its package
MAX_FUNCTION_LINES = 50
TORCH_FREE = next(
    contract["source_modules"]
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if contract["id"] == "torch-free"
)


def toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function's name and the lines of its body, its docstring left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
            code = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            first = code[0].lineno if code else node.end_lineno
            yield node.name, node.end_lineno - first + 1


def imports(node: ast.AST) -> Iterator[str]:
    """Top-level names of what is imported, also on first use, other than for type checkers."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module.split(".")[0]
    elif (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "import_lazily" and isinstance(node.args[1], ast.Dict)
    ):
        yield from (ast.literal_eval(module).split(".")[0] for module in node.args[1].keys if module is not None)
    for child in ast.iter_child_nodes(node):
        yield from imports(child)


def packages_of(requirements: Iterable[str]) -> set[str]:
    """The packages that requirements bring; of one in a shared namespace, such as `backports.zstd`, the namespace."""
    names = {re.split(r"[^\w-]", line, maxsplit=1)[0].replace("-", "_") for line in requirements}
    return {IMPORTED_AS.get(name, name) for name in names}


def folders_imported(test: Path, source: Path) -> set[Path]:
    """The folders of a package whose modules a test imports; what helps tests is left out."""
    found = set()
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == source.name:
            path = Path(*str(node.module).split(".")[1:])  # `.` for names of the front door
            found.add(path if (source / path).is_dir() else path.parent)
    return {path for path in found if "testing" not in path.parts}


def makes_tensor_somewhere(node: ast.AST) -> bool:
    """Whether a call makes a tensor on whatever device is the default where it runs."""
    if not (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    ):
        return False
    makes = node.func.value.id == "torch" and node.func.attr in TENSOR_FACTORIES
    return makes and not any(keyword.arg == "device" for keyword in node.keywords)


@pytest.mark.parametrize("path", [path for path in SOURCES if "testing" not in path.parts], ids=name)
def test_each_tensor_is_made_on_a_device_that_is_named(path: Path) -> None:
    """A trainer may have set a default device, the meta device included."""
    assert [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if makes_tensor_somewhere(node)] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if "testing" not in path.parts], ids=name)
def test_loggers_escape_what_they_show(path: Path) -> None:
    if path.name == "logs.py" and path.parent.name == "dcp_base":
        return
    named = [
        line for line in path.read_text().splitlines() if re.search(r"getLogger\(.", line.replace("getLogger()", ""))
    ]
    assert named == [], "use library_logger of dcp_base.logs"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_errors_name_no_package_that_an_index_may_give_to_somebody_else(path: Path) -> None:
    """Until the first release; docs/development/releasing.md says what changes then."""
    if path.name != "stock_write.py":  # a text in it is a part of the file format, byte for byte
        assert re.findall(r"pip install ['\"]?dcp-", path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_functions_are_short(path: Path) -> None:
    assert [(found, lines) for found, lines in functions(path) if lines > MAX_FUNCTION_LINES] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=name)
def test_folders_say_what_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def test_the_map_shows_every_folder_and_only_files_that_exist() -> None:
    page = (ROOT / "docs" / "development" / "architecture.md").read_text()
    for folder in FOLDERS:
        place = "/".join(folder.parts[folder.parts.index("src") + 2 :])
        purpose = str(ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))).splitlines()[0]
        assert not place or f"| `{place}/` | {purpose} |" in page
    named = re.findall(r"`(dcp_\w+)/([\w/]+\.py)`", page)
    assert len(named) > 40
    missing = [file for package, file in named if not [*ROOT.glob(f"packages/*/src/{package}/{file}")]]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_tests_of_a_folder_are_in_the_folder_of_the_same_name(package: Path) -> None:
    """A test of one module, and a test that imports modules of one folder alone, is where that folder's tests are."""
    source = package / "src" / package.name.replace("-", "_")
    places = {path.stem: path.parent.relative_to(source) for path in source.rglob("*.py") if path.stem != "__init__"}
    wrong = []
    for test in (package / "tests").rglob("test_*.py"):
        place = test.parent.relative_to(package / "tests")
        imported = folders_imported(test, source)
        asked = {places.get(test.stem.removeprefix("test_"))} - {None} or (imported if imported != {Path()} else set())
        if not (source / place).is_dir() or (len(asked) == 1 and asked != {place}):
            wrong.append((name(test), "belongs in", *map(str, asked)))
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_packages_are_complete(package: Path) -> None:
    wanted = ["README.md", "CHANGELOG.md", "LICENSE", "tests", f"src/{package.name.replace('-', '_')}/py.typed"]
    assert [each for each in wanted if not (package / each).exists()] == []


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_packages_declare_their_licence_and_carry_it(package: Path) -> None:
    project = toml(package / "pyproject.toml")["project"]
    assert project["license"] == "BSD-3-Clause"
    assert project["requires-python"] == ">=3.10"
    licence = package / "LICENSE"
    assert not licence.is_symlink(), "a source archive would hold a link that leads nowhere: copy the file"
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_packages_list_the_pythons_they_were_tried_with(package: Path) -> None:
    listed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (package / "pyproject.toml").read_text())
    without_torch = package.name.replace("-", "_") in TORCH_FREE
    assert listed == (["3.10", "3.11", "3.12", "3.13"] if without_torch else ["3.11"])


def test_all_packages_have_one_version_and_require_each_other_at_its_minor() -> None:
    assert versions.disagreements(ROOT) == []


def test_change_notes_are_named_so_that_a_release_collects_them() -> None:
    assert change_notes.misnamed(ROOT) == []
    page = (ROOT / "docs" / "development" / "change-notes.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [*change_notes.HEADINGS]


@pytest.mark.parametrize("package", PACKAGES, ids=name)
def test_packages_declare_what_they_import(package: Path) -> None:
    project = toml(package / "pyproject.toml")["project"]
    extras = project.get("optional-dependencies", {})
    declared = packages_of(project["dependencies"])
    optional = packages_of(line for name, lines in extras.items() if name != "testing" for line in lines)
    sources = [path for path in package.glob("src/**/*.py") if "testing" not in path.parts]
    imported = {each for path in sources for each in imports(ast.parse(path.read_text()))}
    others = imported - sys.stdlib_module_names - NEWER_MODULES - {package.name.replace("-", "_")}
    assert others - optional == declared
    assert optional <= others | {each.name.replace("-", "_") for each in PACKAGES}  # ours are found by entry point


def test_import_contracts_cover_every_package() -> None:
    settings = toml(ROOT / "pyproject.toml")["tool"]["importlinter"]
    assert sorted(settings["root_packages"]) == sorted(package.name.replace("-", "_") for package in PACKAGES)


def test_packages_import_from_each_other_only_what_modules_offer() -> None:
    """`docs/development/support.md` has the levels; the figures bound how many names there are of each."""
    modules = read_modules()
    offered = {(module.name.removesuffix(".__init__"), name) for module in modules for name in module.offered()}
    assert ("dcp_io.requests", "WriteRequest") in offered
    borrowed = {(module.name, *each) for module in modules for each in borrowed_names(module)}
    modules_of_packages = {module.name for module in modules}
    assert (
        sorted(
            f"{importer}: {source}.{name}"
            for importer, source, name in borrowed
            if (source, name) not in offered and f"{source}.{name}" not in modules_of_packages
        )
        == []
    )


@pytest.mark.parametrize("module", TORCH_FREE)
def test_no_public_name_of_a_package_without_torch_imports_it(module: str) -> None:
    code = f"import sys; from {module} import *; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "pip install nox && nox -s tests" in (ROOT / "README.md").read_text()
    assert "-s tests" in (ROOT / ".ci" / "run").read_text()


def test_the_command_knows_which_packages_are_ours() -> None:
    """An unforeseen error of another package's plug-in is a message, and one of ours a traceback."""
    from dcp_inspect.errors import OUR_PACKAGES

    assert {package.name.replace("-", "_") for package in PACKAGES} == OUR_PACKAGES


def test_a_type_alias_is_defined_once_per_package() -> None:
    found: Counter[tuple[str, str, str]] = Counter()
    for path in SOURCES:
        package = path.relative_to(ROOT / "packages").parts[0]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                value = ast.unparse(node.value)
                is_alias = re.match(r"(npt|np)\.|tuple\[|dict\[|bytes \||Callable\[|Mapping\[|Literal\[", value)
                if is_alias and not target.id.startswith("_"):
                    found[package, target.id, value] += 1
    assert [alias for alias, times in found.items() if times > 1] == []


# A root's catalogue removes files of tiers, which are a package above it.
NAMED_TWICE = {".dcp-forgone-", ".dcp-refused-"}


def test_the_name_of_a_file_is_written_once() -> None:
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        if "testing" not in path.parts:
            nodes = [*ast.walk(ast.parse(path.read_text()))]
            texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
                if is_text and re.fullmatch(r"\.dcp-[a-z]+[-a-z.]*", node.value):
                    found.setdefault(node.value, set()).add(name(path))
    assert len(found) > 10, "few found: the test looks for other names"
    assert {each: files for each, files in found.items() if len(files) > 1 and each not in NAMED_TWICE} == {}
