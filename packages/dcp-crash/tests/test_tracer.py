"""The crash kit: what it counts is what strace counts, whoever calls; faults meet the call that they are meant for."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dcp_crash import Fault, mark, run_traced
from dcp_crash.calls import WRITES, Memory

pytestmark = pytest.mark.traced

PROGRAM = """
import os, sys, threading
folder = sys.argv[1]
sys.path[:0] = sys.argv[2].split(os.pathsep)

def sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)

def write(path, *parts):
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.pwritev(descriptor, parts, 0)
    os.fsync(descriptor)
    os.close(descriptor)

def save(name):
    place = os.path.join(folder, name)
    os.mkdir(place)
    write(os.path.join(place, "data"), b"x" * 100, b"y" * 5000)
    write(os.path.join(place, "index.new"), b"index")
    os.replace(os.path.join(place, "index.new"), os.path.join(place, "index"))
    sync_folder(place)
    os.unlink(os.path.join(place, "data"))
    sync_folder(place)

save("first")
thread = threading.Thread(target=save, args=("second",))
thread.start()
thread.join()
if os.fork() == 0:
    save("third")
    os._exit(0)
os.wait()
"""


def write_twice(folder: Path) -> None:
    """Six calls, of which the second and the third write."""
    descriptor = os.open(folder / "file", os.O_WRONLY | os.O_CREAT)
    os.pwritev(descriptor, [b"a" * 300, b"b" * 700], 0)
    os.lseek(descriptor, 1000, os.SEEK_SET)
    os.write(descriptor, b"c" * 100)
    os.fsync(descriptor)
    os.close(descriptor)
    os.rename(folder / "file", folder / "named")


CALLS = ["openat", "pwritev", "write", "fsync", "close", "rename"]


def plain(names: list[str]) -> list[str]:
    """Names of calls as they were before they took flags: which one a libc makes is its own affair."""
    return [re.sub(r"pwritev2", "pwritev", re.sub(r"renameat2?", "rename", name)) for name in names]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_the_calls_are_those_that_strace_sees(tmp_path: Path) -> None:
    """In threads and in processes, too."""
    path = os.pathsep.join(filter(None, sys.path))
    seen, traced = tmp_path / "seen", tmp_path / "traced"
    seen.mkdir()
    traced.mkdir()
    # strace has no filter for the flags of opening, nor for folders: its lines are filtered here.
    names = sorted({kind.name for kind in WRITES})
    command = [sys.executable, "-c", PROGRAM, str(seen), path]
    subprocess.run(
        ["strace", "-f", "-y", "-qq", "-o", str(tmp_path / "log"), "-e", f"trace={','.join(names)}", *command],
        check=True,
    )
    wanted = []
    for line in (tmp_path / "log").read_text().splitlines():
        found = re.match(r"\d+ +(\w+)\((.*)", line)
        if found is None or str(seen) not in found[2] or "(deleted)" in found[2]:
            continue
        if found[1] in {"open", "openat"} and "O_CREAT" not in found[2] and "O_TRUNC" not in found[2]:
            continue
        wanted.append(found[1])

    run = run_traced([sys.executable, "-c", PROGRAM, str(traced), path], traced)
    (end,) = run.ranks
    assert (end.error, end.status) == (None, 0)
    assert [call.name for call in run.calls] == wanted
    assert (len(end.calls), len(end.started_calls)) == (2 * len(wanted) // 3, len(wanted) // 3)
    assert len(wanted) > 30


def test_calls_are_counted_and_nothing_else_happens(tmp_path: Path) -> None:
    run = run_traced(lambda rank: write_twice(tmp_path), tmp_path)
    assert plain(run.ranks[0].calls) == CALLS
    assert not run.struck
    assert (tmp_path / "named").stat().st_size == 1100


def test_calls_elsewhere_and_before_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    run = run_traced(
        lambda rank: write_twice(tmp_path / "there"),
        tmp_path / "here",
        prepare=lambda rank: write_twice(tmp_path / "here"),
    )
    assert run.ranks[0].calls == []
    assert (tmp_path / "here" / "named").exists()


def test_calls_by_relative_paths_and_through_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    def action(rank: int) -> None:
        os.chdir(tmp_path)
        Path("link/made").mkdir()
        folder = os.open("real", os.O_RDONLY)
        os.mkdir("also", dir_fd=folder)

    assert run_traced(action, tmp_path / "link").ranks[0].calls == ["mkdir", "mkdirat"]


@pytest.mark.parametrize("at", range(1, 7))
def test_killed_before_a_call(tmp_path: Path, at: int) -> None:
    run = run_traced(lambda rank: write_twice(tmp_path), tmp_path, fault=Fault("kill", at))
    assert run.struck
    assert run.ranks[0].signal == signal.SIGKILL
    assert plain(run.ranks[0].calls) == CALLS[:at]
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == [{}, {"file": 0}, {"file": 1000}, {"file": 1100}, {"file": 1100}, {"file": 1100}][at - 1]


@pytest.mark.parametrize(("at", "size"), [(2, 500), (3, 1050)])
def test_torn_writes(tmp_path: Path, at: int, size: int) -> None:
    run = run_traced(lambda rank: write_twice(tmp_path), tmp_path, fault=Fault("torn", at))
    assert run.ranks[0].signal == signal.SIGKILL
    data = (tmp_path / "file").read_bytes()
    assert data == (b"a" * 300 + b"b" * 700 + b"c" * 100)[:size]


@pytest.mark.parametrize("at", [2, 3])
def test_short_writes(tmp_path: Path, at: int) -> None:
    written: list[int] = []

    def action(rank: int) -> list[int]:
        descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        buffers = [b"a" * 300, b"b" * 700]
        written.append(os.pwritev(descriptor, buffers, 0))
        written.append(os.write(descriptor, b"c" * 100))
        return [*written, len(buffers[1])]

    run = run_traced(action, tmp_path, fault=Fault("short", at))
    assert run.ranks[0].result == ([500, 100, 700] if at == 2 else [1000, 50, 700])


@pytest.mark.parametrize(("kind", "number"), [("eio", errno.EIO), ("enospc", errno.ENOSPC)])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_failing_calls(tmp_path: Path, kind: str, number: int, at: int) -> None:
    """An error happens once, a full disk stays full; both are errors of the call alone."""

    def number_of(step) -> int:
        try:
            step()
        except OSError as error:
            return error.errno
        return 0

    def action(rank: int) -> list[int]:
        opened: list[int] = []
        found = [number_of(lambda: opened.append(os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)))]
        if not opened:
            return found
        found.append(number_of(lambda: os.pwritev(opened[0], [b"a"], 0)))
        found.append(number_of(lambda: os.write(opened[0], b"b")))
        found.append(number_of(lambda: os.fsync(opened[0])))
        found.append(number_of(lambda: os.close(opened[0])))
        assert number_of(lambda: os.fstat(opened[0])) == errno.EBADF
        return found

    found = run_traced(action, tmp_path, fault=Fault(kind, at)).ranks[0].result
    needs_space = (True, True, True, False, False)
    if at == 1:
        assert found == [number]
    elif kind == "eio":
        assert found == [number if call == at else 0 for call in range(1, 6)]
    else:
        assert found == [number if call >= at and needs_space[call - 1] else 0 for call in range(1, 6)]


def test_held_at_a_call(tmp_path: Path) -> None:
    seen: list[list[str]] = []
    run = run_traced(
        lambda rank: write_twice(tmp_path),
        tmp_path,
        fault=Fault("stop", 6),
        held=lambda pid: seen.append(os.listdir(tmp_path)),
    )
    assert seen == [["file"]]
    assert run.ranks[0].survived
    assert os.listdir(tmp_path) == ["named"]


def test_reading_calls(tmp_path: Path) -> None:
    write_twice(tmp_path)

    def action(rank: int) -> int:
        os.listdir(tmp_path)
        return len((tmp_path / "named").read_bytes())

    run = run_traced(action, tmp_path, reads=True)
    assert run.ranks[0].result == 1100
    assert run.ranks[0].calls.count("openat") == 2
    assert {"getdents64", "read"} <= set(run.ranks[0].calls)


def test_the_memory_of_a_thread_that_has_been_killed_has_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "read", lambda memory, address, count: b"")  # as of a zombie, on some kernels
    with pytest.raises(ProcessLookupError):
        Memory(os.getpid()).text(4096)


def test_the_rank_that_is_meant_is_struck(tmp_path: Path) -> None:
    def action(rank: int) -> int:
        folder = tmp_path / str(rank)
        folder.mkdir()
        write_twice(folder)
        return rank

    ends = run_traced(action, tmp_path, world=3, fault=Fault("kill", 3, rank=1), grace_seconds=60).ranks
    assert [end.signal for end in ends] == [None, signal.SIGKILL, None]
    assert [end.result for end in ends] == [0, None, 2]


def test_only_started_processes_are_struck(tmp_path: Path) -> None:
    def action(rank: int) -> int:
        (tmp_path / "own").mkdir()
        pid = os.fork()
        if pid == 0:
            write_twice(tmp_path)
            os._exit(0)
        return os.waitpid(pid, 0)[1]

    (end,) = run_traced(action, tmp_path, fault=Fault("kill", 2, of="started")).ranks
    assert end.result == signal.SIGKILL
    assert end.calls == ["mkdir"]
    assert plain(end.started_calls) == CALLS[:2]


def test_others_are_killed_soon_after_one_was(tmp_path: Path) -> None:
    def action(rank: int) -> None:
        if rank == 0:
            write_twice(tmp_path)
        time.sleep(1000)

    ends = run_traced(action, tmp_path, world=2, fault=Fault("kill", 1), grace_seconds=0.1).ranks
    assert [end.signal for end in ends] == [signal.SIGKILL, signal.SIGKILL]


def runs(pid: int) -> bool:
    """Whether the process exists, and is not merely one that its parent has not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    ids = tmp_path / "ids"

    def action(rank: int) -> None:
        started = subprocess.Popen(["sleep", "1000"])  # makes no call on the directory
        ids.write_text(f"{os.getpid()} {started.pid}")
        started.wait()

    (tmp_path / "folder").mkdir()
    with pytest.raises(TimeoutError, match="1 s"):
        run_traced(action, tmp_path / "folder", timeout_seconds=1)
    assert not any(map(runs, map(int, ids.read_text().split())))


def test_with_all_of_a_rank_its_processes_are_killed_together(tmp_path: Path) -> None:
    """Also those that have not made a call, and whoever makes the call."""
    ids = tmp_path / "ids"

    def action(rank: int) -> None:
        started = subprocess.Popen(["sleep", "1000"])
        ids.write_text(str(started.pid))
        if os.fork() == 0:
            write_twice(tmp_path / "folder")
        time.sleep(1000)

    (tmp_path / "folder").mkdir()
    run = run_traced(action, tmp_path / "folder", fault=Fault("kill", 2, of="all"), grace_seconds=1000)
    assert run.struck
    assert run.ranks[0].signal == signal.SIGKILL
    assert not runs(int(ids.read_text()))


def test_a_program_is_traced_like_a_function(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    program = ["sh", "-c", "echo said; read line; echo b > folder/a; mv folder/a folder/b; exit 3"]
    folder = os.path.relpath(tmp_path / "folder")
    script = [program[0], program[1], program[2].replace("folder", folder)]
    run = run_traced(script, folder, output=tmp_path / "output", record=True)
    assert (run.ranks[0].status, run.ranks[0].error) == (3, None)
    assert (tmp_path / "output").read_text() == "said\n"
    assert [change.kind for change in run.changes] == ["create", "write", "rename"]
    assert {os.path.basename(call.places[0]) for call in run.calls} == {"a"}
    write = [call.name for call in run.calls].index("write") + 1
    run_traced(script, folder, output=tmp_path / "output", fault=Fault("eio", write, of="all"))
    assert "I/O error" in (tmp_path / "output").read_text()
    assert (tmp_path / "folder" / "b").read_bytes() == b""


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (end,) = run_traced([str(tmp_path / "nothing")], tmp_path).ranks
    assert "FileNotFoundError" in str(end.error)


def test_what_is_raised_is_told(tmp_path: Path) -> None:
    def action(rank: int) -> None:
        raise RuntimeError("failed on purpose")

    (end,) = run_traced(action, tmp_path).ranks
    assert end.survived
    assert "RuntimeError: failed on purpose" in end.error


def test_other_children_are_left_alone(tmp_path: Path) -> None:
    """Whoever waits for a process of its own gets its exit status."""
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    before = {*threading.enumerate()}
    run_traced(lambda rank: write_twice(tmp_path), tmp_path)
    assert other.wait(60) == 7
    assert {*threading.enumerate()} <= before


def test_faults_are_checked() -> None:
    with pytest.raises(ValueError, match="'kill'"):
        Fault("explode", 1)
    with pytest.raises(ValueError, match="counted from 1"):
        Fault("kill", 0)


def test_marks_leave_nothing_behind() -> None:
    mark("saved")
    assert not os.path.lexists("/.dcp-crash-mark")
