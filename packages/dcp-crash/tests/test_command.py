"""`dcp-crash run`: programs that lose files are found out, and programs that do not are not."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dcp_crash import kernel
from dcp_crash.command import main

pytestmark = pytest.mark.traced

SETTINGS = """
import os, sys
step = int(open("files/settings").read())  # fails on what is torn
options = sys.argv[1:]
name = "files/settings" if "in-place" in options else "files/settings.new"
with open(name, "w") as file:
    file.write(str(11))
    if "sync" in options:
        file.flush()
        os.fsync(file.fileno())
if "in-place" not in options:
    os.replace(name, "files/settings")
if "sync" in options:
    folder = os.open("files", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that programs write; the current one."""
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "settings").write_text("10")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def program(code: str, *arguments: str) -> list[str]:
    Path("program.py").write_text(code)
    return [sys.executable, "-S", "-E", "program.py", *arguments]


def run(capsys: pytest.CaptureFixture[str], options: str, command: list[str]) -> tuple[int, dict[str, Any]]:
    status = main(["run", "--dir", "files", "--json", *shlex.split(options), "--", *command])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, json.loads(printed.out)


def verdicts(document: dict[str, Any], fault: str) -> set[str]:
    return {trial["verdict"] for trial in document["trials"] if trial["fault"] == fault}


def test_a_replacement_without_fsync_loses_its_file_on_power_loss_alone(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(capsys, "--no-resume --compare files/settings", program(SETTINGS))
    assert status == 1
    assert [verdicts(document, fault) for fault in ("kill", "torn", "short", "eio", "enospc")] == [{"held"}] * 5
    assert verdicts(document, "power") == {"held", "lost"}
    assert document["counts"]["lost"] == sum(trial["verdict"] == "lost" for trial in document["trials"])
    assert Path("files/settings").read_text() == "10"
    assert os.listdir("files") == ["settings"]


def test_a_synced_replacement_holds(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(capsys, "--no-resume --compare files/settings --every 1", program(SETTINGS, "sync"))
    assert (status, document["counts"].keys()) == (0, {"held"})
    assert {trial["system_call"] for trial in document["trials"]} >= {"openat", "write", "fsync", "rename", "end"}
    killed = [trial for trial in document["trials"] if trial["fault"] == "kill"]
    assert [trial["call"] for trial in killed] == [*range(1, document["calls"] + 1)]
    assert {trial["program"] for trial in killed} == {"SIGKILL"}
    assert {trial["path"] for trial in killed if trial["system_call"] == "rename"} == {"settings.new -> settings"}


def test_a_file_that_is_written_in_place_is_lost_by_a_kill(capsys: pytest.CaptureFixture[str]) -> None:
    """The program is its own resume, which fails when it reads an empty file."""
    status, document = run(capsys, "--fault kill,torn", program(SETTINGS, "in-place"))
    assert status == 1
    lost = [trial for trial in document["trials"] if trial["verdict"] == "lost"]
    assert "write" in {trial["system_call"] for trial in lost if trial["fault"] == "kill"}
    assert all(trial["resume"] == 1 and "ValueError: invalid literal" in trial["reason"] for trial in lost)


def test_lost_files_are_kept_for_a_look(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(capsys, "--fault kill,power --keep kept", program(SETTINGS, "in-place"))
    assert status == 1
    kept = {path.name: (path / "settings").read_text() for path in Path("kept").iterdir()}
    lost = [trial for trial in document["trials"] if trial["verdict"] == "lost"]
    killed = {f"kill-{trial['call']}" for trial in lost if trial["fault"] == "kill"}
    assert killed == {name for name in kept if name.startswith("kill-")} != set()
    assert len(kept) == len(lost) > len(killed)
    assert {kept[name] for name in killed} == {""}


def test_the_old_files_are_enough_only_without_a_resume(capsys: pytest.CaptureFixture[str]) -> None:
    status, document = run(
        capsys, "--fault kill --resume true --compare files/settings", program(SETTINGS, "sync", "--")
    )
    assert status == 1
    lost = [trial for trial in document["trials"] if trial["verdict"] == "lost"]
    assert {trial["reason"] for trial in lost} == {"files/settings is the old file"}


def test_a_success_that_was_reported_must_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    """A program that ends with 0 in spite of an error has not saved the new file."""
    code = "try: open('files/settings', 'w').write('11')\nexcept OSError: pass"
    status, document = run(capsys, "--no-resume --compare files/settings --fault eio", program(code))
    assert status == 1
    assert "lost" in {trial["verdict"] for trial in document["trials"] if trial["program"] == 0}


def test_a_short_write_must_be_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """`os.write` returns how much it wrote, which is easily ignored."""
    code = "import os\nos.write(os.open('files/settings', os.O_WRONLY), b'11')"
    status, document = run(capsys, "--no-resume --compare files/settings --fault short", program(code))
    assert status == 1
    assert [(trial["verdict"], trial["program"]) for trial in document["trials"]] == [("lost", 0)]


def test_compared_files_are_of_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    code = """
import os
for name in ("files/a", "files/b"):
    open(f"{name}.new", "w").write("new")
    os.replace(f"{name}.new", name)
"""
    status, document = run(capsys, "--no-resume --compare files/a files/b --fault kill", program(code))
    assert status == 1
    assert {trial["reason"] for trial in document["trials"] if trial["verdict"] == "lost"} == {
        "files/a new, and other compared files old"
    }


def test_a_full_disk_that_the_program_handles(capsys: pytest.CaptureFixture[str]) -> None:
    code = SETTINGS.replace(
        "import os, sys", "import os, sys\ntry: os.unlink('files/settings.new')\nexcept OSError: pass"
    )
    check = f'{shlex.quote(sys.executable)} -c \'import os; assert os.listdir("files") == ["settings"]\''
    status, document = run(capsys, f"--fault enospc --check {shlex.quote(check)}", program(code, "sync"))
    assert status == 0
    assert {trial["program"] for trial in document["trials"]} == {1}
    assert {trial["resume"] for trial in document["trials"]} == {0}


def test_the_check_decides(capsys: pytest.CaptureFixture[str]) -> None:
    check = "echo looked; test ! -e files/settings.new"
    status, document = run(capsys, f"--fault kill --no-resume --check {shlex.quote(check)}", program(SETTINGS, "sync"))
    assert status == 1
    lost = {trial["system_call"]: trial["reason"] for trial in document["trials"] if trial["verdict"] == "lost"}
    assert lost.keys() >= {"write", "rename"}
    assert lost["write"] == "the check ended with 1: looked"


INSERT = """
import sqlite3, sys
table = sqlite3.connect("files/table")
table.execute(f"PRAGMA synchronous={sys.argv[1]}")
table.execute("CREATE TABLE IF NOT EXISTS texts (text)")
table.execute("INSERT INTO texts VALUES (?)", ("x" * 5000,))
table.commit()
"""
CHECK = """
import sqlite3
table = sqlite3.connect("files/table")
assert table.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
assert table.execute("SELECT count(*), min(length(text)) FROM texts").fetchone() in ((1, 5000), (2, 5000))
"""


@pytest.mark.parametrize(("synchronous", "lost"), [("EXTRA", set()), ("OFF", {"power"})])
@pytest.mark.parametrize("points", ["--sample 20", pytest.param("--every 1", marks=pytest.mark.slow)])
def test_sqlite_holds_if_it_may_sync(
    capsys: pytest.CaptureFixture[str], synchronous: str, lost: set[str], points: str
) -> None:
    """A database that is known to survive crashes, in every state of the disk that we think possible."""
    insert = [sys.executable, "-E", *program(INSERT, synchronous)[3:]]
    subprocess.run(insert, check=True)
    Path("check.py").write_text(CHECK)
    options = f"--fault kill,torn,power {points} --no-resume --check {shlex.quote(f'{sys.executable} -E check.py')}"
    status, document = run(capsys, options, insert)
    assert status == bool(lost)
    assert {trial["fault"] for trial in document["trials"] if trial["verdict"] == "lost"} == lost
    assert len(document["trials"]) > 40


def test_processes_that_the_program_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """A killed program is killed with its processes: none writes into the next trial."""
    code = """
import os, sys, time
pid = os.fork()
if pid == 0:
    open("files/child.new", "w").write("new")
    os.replace("files/child.new", "files/child")
    os._exit(0)
os.waitpid(pid, 0)
open("files/parent", "w").close()
"""
    status, document = run(capsys, "--fault kill --compare files/child files/parent", program(code))
    assert status == 0
    assert {trial["path"] for trial in document["trials"]} == {"child.new", "child.new -> child", "parent"}
    assert {trial["program"] for trial in document["trials"]} == {"SIGKILL"}


def test_a_sample_is_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    code = "for n in range(30): open(f'files/{n}', 'w').write('x')"

    def points(seed: int) -> list[tuple[str, int, str | None]]:
        options = f"--fault kill,power --sample 4 --seed {seed} --no-resume --check true"
        _, document = run(capsys, options, program(code))
        assert document["seed"] == seed
        return [(trial["fault"], trial["call"], trial["disk"]) for trial in document["trials"]]

    first = points(3)
    assert len(first) == 8
    assert points(3) == first
    assert points(4) != first


def test_a_program_that_hangs_after_a_fault_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import time\ntry:\n    open('files/new', 'w').close()\nexcept OSError:\n    time.sleep(1000)"
    status, document = run(capsys, "--fault eio --every 100 --timeout 15", program(code))
    assert status == 1
    (trial,) = document["trials"]
    assert (trial["verdict"], trial["program"], trial["resume"]) == ("hung", "timeout", 0)
    assert trial["reason"] == "the program did not end within 15 s"


def test_compared_files_elsewhere_are_not_left_from_an_earlier_trial(capsys: pytest.CaptureFixture[str]) -> None:
    """The resume does not write the file, which the first run has written."""
    code = SETTINGS + "open('result', 'w').write('done')"
    status, document = run(capsys, "--fault kill --resume true --compare result", program(code, "sync"))
    assert status == 1
    assert {trial["reason"] for trial in document["trials"]} == {"result is missing"}
    assert not Path("result").exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = main(arguments)
    except SystemExit as error:
        status = int(str(error.code))
    assert status == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return printed.err


FAILING = [
    ("raise SystemExit('line\\n' * 50 + 'cannot start')", "It printed:\n" + "line\n" * 19 + "cannot start\n"),
    ("raise SystemExit('cannot start')", "the program fails without any fault, with 1. It printed:\ncannot start"),
    ("pass", "files: the program does not change this directory, so there is nothing to try"),
    ("open('files/x', 'w')", "files/absent: to be compared, but not there after a run without a fault"),
    (
        "import time; open('files/absent', 'w').write(str(time.time_ns()))",
        "also without any fault: files/absent has other bytes\nare seeds fixed",
    ),
    (
        "import mmap; f = open('files/absent', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); m[:2] = b'xx'",
        "files/absent: changed by other means than traced system calls",
    ),
]


@pytest.mark.parametrize(("code", "message"), FAILING)
def test_a_run_that_proves_nothing_is_an_error(capsys: pytest.CaptureFixture[str], code: str, message: str) -> None:
    command = ["run", "--dir", "files", "--compare", "files/absent", "--", *program(code)]
    assert message in refused(capsys, *command)
    assert os.listdir("files") == ["settings"]


WRONG = [
    ("--dir files", "name the program after --"),
    ("--dir files -- no-such-program", "no-such-program: no such program"),
    ("--dir program.py -- true", "not a directory"),
    ("--dir . -- true", "must not contain the current directory"),
    ("--dir files --keep files/kept -- true", "--keep files/kept: in the directory of --dir"),
    ("--dir files --no-resume -- true", "--no-resume needs --compare or --check"),
    (
        "--dir files --fault kill,fire -- true",
        "'fire' is not a fault; choose from kill, torn, short, eio, enospc, power",
    ),
    ("--dir files --sample 0 -- true", "'0' is not a number from 1"),
    ("--dir files --timeout soon -- true", "'soon' is not a number of seconds"),
    ("--dir files --every 2 --sample 2 -- true", "not allowed with"),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_wrong_use_is_explained(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    Path("program.py").touch()
    assert message in refused(capsys, "run", *line.split())


@pytest.mark.parametrize(
    ("machine", "may_trace", "message"),
    [("aarch64", True, "this is Linux on aarch64"), ("x86_64", False, "ptrace is forbidden here")],
)
def test_a_machine_that_cannot_trace_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    may_trace: bool,
    message: str,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(kernel, "_may_trace", lambda: may_trace)
    assert message in refused(capsys, "run", "--dir", "files", "--", "true")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "--dir", "files", "--no-resume", "--compare", "files/settings", "--", *program(SETTINGS)]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("5 system calls of `")
    assert lines[2].split() == ["fault", "call", "system", "call", "program", "resume", "verdict", "path"]
    assert "kill        3  write            SIGKILL  -        held     settings.new" in lines
    reason = lines.index(" " * 15 + "files/settings has other bytes")
    assert lines[reason + 1].startswith(" " * 15 + "on the disk: ")
    assert "kill    5 held" in lines
    assert lines[-1].endswith("trials")


def test_a_directory_that_is_not_there_is_made_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    command = program("open('new/file', 'w').close()")
    assert main(["run", "--dir", "new", "--fault", "kill", "--", *command]) == 0
    assert not Path("new").exists()


def test_an_interrupt_restores_the_directory(place: Path) -> None:
    code = "open('files/settings', 'w').close()\nopen('ready', 'w').close()\nimport time\ntime.sleep(1000)"
    started = "import sys; from dcp_crash.command import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", started, "run", "--dir", "files", "--", *program(code)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not Path("ready").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate()
    assert (process.returncode, error) == (130, "dcp-crash: interrupted; the directory is restored\n")
    assert Path("files/settings").read_text() == "10"


def test_help_shows_faults_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {fault} " in printed for fault in ("kill", "torn", "short", "eio", "enospc", "power"))
    assert "dcp-crash run --dir ckpt -- python train.py" in printed
    assert max(map(len, printed.splitlines())) <= 88
