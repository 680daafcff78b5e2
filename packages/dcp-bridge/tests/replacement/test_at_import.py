"""`python -m dcp_bridge`: replacement without a line of code, and the processes that a program starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SECONDS = 800

pytestmark = pytest.mark.timeout(900)


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )


def passed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


# What forked processes do with what they get by name.
SCRIPT = """
import multiprocessing, os, sys
import torch.distributed as dist

def check(queue):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    queue.put((dcp.save.__module__, get_model_state_dict.__module__))

if __name__ == "__main__":
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader

    assert sys.argv[1] == "--folder", sys.argv
    assert sys.modules["__main__"].check is check
    folder = sys.argv[2]
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder)
    assert FileSystemReader(folder).read_metadata().storage_meta.modules == ["dcp-manifest/1"]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=check, args=(queue,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert queue.get() == ("dcp_core.saving", "dcp_state.model")
    if dist.is_initialized():
        dist.destroy_process_group()
    print("saved by", type(dcp).__name__)
"""


def test_ranks_of_torchrun_and_what_they_start(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run(*launcher, "-m", "dcp_bridge", "train.py", "--folder", str(tmp_path / "a"), cwd=tmp_path)
    assert passed(done).count("saved by _StandInModule") == 2


FIRST_IMPORTS = """
import importlib.util, sys
assert importlib.util.find_spec("torch.distributed.checkpoint") is not None  # a look does not count as an import
assert "torch.distributed.checkpoint" not in sys.modules
import torch
known, torch.__version__ = torch.__version__, "9.9.0"
for _ in range(2):  # a second import raises the same error
    try:
        import torch.distributed.checkpoint
    except Exception as error:
        assert type(error).__name__ == "DcpError", error
        assert "torch is 9.9.0" in str(error), error
    else:
        raise AssertionError("replaced")
torch.__version__ = known
import torch.distributed.tensor._shards_wrapper  # torch's own module that names stock's records
from torch.distributed.checkpoint.filesystem import FileSystemWriter
import dcp_fs, torch.distributed.checkpoint as dcp
assert FileSystemWriter is dcp_fs.FileSystemWriter is dcp.FileSystemWriter
assert torch.distributed.checkpoint is dcp is sys.modules["torch.distributed.checkpoint"]
assert [type(each).__name__ for each in sys.meta_path if "dcp" in type(each).__module__] == ["_ReloadGuard"]
assert type(dcp.__spec__.loader).__name__ == "SourceFileLoader"
from dcp_bridge import replace_stock
with replace_stock() as made:
    assert made.replaced
assert dcp.save.__module__ == "dcp_core.saving"  # the command's goes on
"""


def test_the_first_import(tmp_path):
    (tmp_path / "program.py").write_text(FIRST_IMPORTS)
    passed(run("-m", "dcp_bridge", "program.py", cwd=tmp_path))


TOLD = """
import pickle, sys
class Mine: ...
def main():
    spec = __spec__ and __spec__.name
    print(__name__, sys.argv[1:], __file__ == sys.argv[0] or (__file__, sys.argv[0]), spec)
    assert type(pickle.loads(pickle.dumps(Mine()))) is sys.modules["__main__"].Mine is Mine
    assert __builtins__.print is print  # in __main__ it is the module
    assert "torch" not in sys.modules
    import beside
    if "--fail" in sys.argv:
        sys.exit(7)
main()
"""


@pytest.fixture
def programs(tmp_path) -> Path:
    for folder in (tmp_path / "scripts", tmp_path / "package", tmp_path / "archive"):
        folder.mkdir()
    for file in ("scripts/told.py", "scripts/told", "module.py", "package/__main__.py", "archive/__main__.py"):
        (tmp_path / file).write_text(TOLD)
    for file in ("scripts/beside.py", "beside.py", "archive/beside.py", "package/__init__.py"):
        (tmp_path / file).touch()
    (tmp_path / "package" / "lacking.py").write_text("import not_installed")
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import not_installed")
    return tmp_path


PROGRAMS: dict[str, tuple[list[str], str]] = {
    "script": (["scripts/told.py"], "None"),
    "script without suffix": (["scripts/told"], "None"),
    "module": (["-m", "module"], "module"),
    "package": (["-m", "package"], "package.__main__"),
    "folder": (["archive"], "__main__"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_are_run_as_python_runs_them(programs, kind):
    command, spec = PROGRAMS[kind]
    arguments = [*command, "--lr", "3", "-m", "x"]
    by_us = run("-m", "dcp_bridge", *arguments, cwd=programs)
    by_python = run(*arguments, cwd=programs)
    assert passed(by_us) == passed(by_python)
    assert f"__main__ ['--lr', '3', '-m', 'x']" in by_us.stdout  # noqa: F541 - as it is printed
    assert by_us.stdout.split()[-1] == spec


def test_the_status_is_the_programs(programs):
    assert run("-m", "dcp_bridge", "scripts/told.py", "--fail", cwd=programs).returncode == 7


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["lost.py"], "there is no script lost.py"),
        (["-m", "lost"], "there is no module lost"),
        (["-m", "lost.deeper"], "there is no module lost.deeper"),
        (["-m", "package.lost"], "there is no module package.lost"),
        (["-m", ".module"], ".module is relative"),
        (["scripts"], "the directory scripts has no __main__.py"),
        ([""], "there is no script"),
        ([], "PROGRAM"),
    ],
)
def test_programs_that_are_not_there(programs, command: list[str], said: str):
    done = run("-m", "dcp_bridge", *command, cwd=programs)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["package.lacking", "lacking", "lacking.deeper"])
def test_a_program_that_lacks_a_module_says_which(programs, module: str):
    done = run("-m", "dcp_bridge", "-m", module, cwd=programs)
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'not_installed'\n")


def test_verbose_says_what_was_replaced(tmp_path):
    (tmp_path / "program.py").write_text("import torch.distributed.checkpoint as dcp; print(type(dcp).__name__)")
    done: Any = run("-m", "dcp_bridge", "-v", "--any-torch", "program.py", cwd=tmp_path)
    assert passed(done) == "_StandInModule"
    assert "<Replacement: torch.distributed.checkpoint of torch " in done.stderr
