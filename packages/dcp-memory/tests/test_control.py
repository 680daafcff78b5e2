"""Keepers from start to end: one for each run, for its own user alone, and nothing left of it."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcp_io import Sink, StorageError, find_checkpoints
from dcp_manifest import CheckpointNotFoundError
from dcp_memory import KeeperLostError, keeper_status, start_keeper, stop_keeper
from dcp_memory.client.store import KeeperStore
from dcp_memory.errors import KeeperRefusedError
from dcp_memory.places import FOLDER_VARIABLE, KeeperFolder, folder_path
from dcp_memory.wire import encode

USER = 12345
"""Number of a user who is not the one of the tests."""
KEEPER = [sys.executable, "-m", "dcp_memory.keeper"]


def eventually(condition: Callable[[], object]) -> None:
    """Wait for something that is bound to happen; the test's own deadline is the limit."""
    while not condition():
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_reading_starts_no_keeper(run: str, folder: Path) -> None:
    store = KeeperStore(run, "step-1")
    assert (store.list(), store.folders(), store.exists("x"), store.holding(["x"])) == ([], (), False, set())
    assert find_checkpoints(store) == []
    store.delete("x")
    for call in (store.read, store.open, store.size, store.touch):
        with pytest.raises(CheckpointNotFoundError, match=f"no keeper of {run} runs on this host"):
            call("x")
    assert keeper_status(run) is None
    assert not stop_keeper(run)
    assert not folder.exists()


def test_nothing_is_left_after_the_end(run: str, folder: Path) -> None:
    status = start_keeper(run)
    KeeperStore(run).publish("x", bytes(1 << 20))
    assert {path.name for path in folder.iterdir()} == {f"{run}.lock", f"{run}.log", f"{run}.sock"}
    assert stop_keeper(run)
    assert is_gone(status.pid)
    assert [*folder.iterdir()] == []
    assert not KeeperStore(run).exists("x")


def test_processes_that_start_it_at_the_same_time_get_the_same(run: str) -> None:
    code = "import sys; from dcp_memory import start_keeper; print(start_keeper(sys.argv[1]).pid)"
    with ThreadPoolExecutor(3) as pool:
        found = [*pool.map(lambda _: python(code, run), range(3))]
    assert [each.stderr for each in found] == [""] * 3
    assert len({each.stdout for each in found}) == 1


def test_runs_have_keepers_of_their_own(run: str) -> None:
    KeeperStore(run).publish("x", b"1")
    KeeperStore("another").publish("x", b"2")
    assert KeeperStore(run).read("x") == b"1"
    stop_keeper(run)
    assert KeeperStore("another").read("x") == b"2"


def test_it_outlives_the_process_group_that_started_it(run: str) -> None:
    code = (
        "import sys; from dcp_memory.client.store import KeeperStore; "
        "KeeperStore(sys.argv[1]).publish('x', b'1'); sys.stdin.read()"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code, run], stdin=subprocess.PIPE, start_new_session=True)
    eventually(lambda: KeeperStore(run).exists("x"))
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.communicate()
    assert KeeperStore(run).read("x") == b"1"


def test_a_killed_keeper_is_replaced(run: str, folder: Path) -> None:
    store = KeeperStore(run)
    store.publish("x", b"1")
    os.kill(start_keeper(run).pid, signal.SIGKILL)
    eventually(lambda: keeper_status(run) is None)
    with pytest.raises(CheckpointNotFoundError, match="no keeper"):
        store.read("x")
    assert not stop_keeper(run)
    assert [*folder.iterdir()] == []
    os.kill(start_keeper(run).pid, signal.SIGKILL)
    eventually(lambda: keeper_status(run) is None)
    store.publish("x", b"2")
    assert store.read("x") == b"2"


def test_what_is_written_to_a_killed_keeper_is_lost_by_name(run: str) -> None:
    store = KeeperStore(run)
    sink, other = store.create("x"), store.create("y")
    other.write([bytes(1 << 20)])
    os.kill(start_keeper(run).pid, signal.SIGKILL)
    with pytest.raises(KeeperLostError, match=f"keeper://{run}"):
        sink.write([bytes(1 << 20)])
    sink.abort()
    store.publish("x", b"2")
    with pytest.raises(KeeperLostError):
        other.close()
    assert [entry.name for entry in store.list()] == ["x"]


def test_an_idle_keeper_ends(run: str) -> None:
    start_keeper(run, idle_timeout_seconds=0)
    eventually(lambda: keeper_status(run) is None)


def test_a_keeper_that_ends_between_greeting_and_answer_is_none(run: str, folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{run}.sock"

    def end_after_greeting(listener: socket.socket) -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(encode({}))
            path.unlink()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(end_after_greeting, listener)
        assert keeper_status(run) is None
        ended.result()


def test_a_process_that_has_saved_keeps_it(run: str) -> None:
    start_keeper(run, idle_timeout_seconds=600)
    code = (
        "import os, sys, time; from dcp_memory.client.store import KeeperStore; s = KeeperStore(sys.argv[1], storage_"
        "options={'idle_timeout_seconds': 0}); s.publish('x', b''); time.sleep(1.5); s.read('x'); print('kept')"
    )
    stop_keeper(run)
    assert python(code, run).stdout == "kept\n"
    eventually(lambda: keeper_status(run) is None)


def test_it_ends_with_its_parent_if_asked_to(run: str) -> None:
    code = "import sys; from dcp_memory import start_keeper; print(start_keeper(sys.argv[1], with_parent=True).pid)"
    pid = int(python(code, run).stdout)
    eventually(lambda: is_gone(pid))
    assert keeper_status(run) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_end_it_cleanly(run: str, folder: Path, number: int) -> None:
    with subprocess.Popen([*KEEPER, run], stderr=subprocess.PIPE) as process:
        eventually(lambda: keeper_status(run) is not None)
        KeeperStore(run).publish("x", b"1")
        process.send_signal(number)
        assert process.communicate()[1] == b""
    assert process.returncode == 0
    assert [*folder.iterdir()] == []


def test_a_second_keeper_of_a_run_leaves_it_to_the_first(run: str) -> None:
    pid = start_keeper(run).pid
    assert subprocess.run([*KEEPER, run], check=False).returncode == 0
    assert start_keeper(run).pid == pid


def test_a_stopped_keeper_is_named_and_can_be_killed(run: str) -> None:
    pid = start_keeper(run).pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(KeeperLostError, match=f"process {pid}, has not ended after 0.1 s"):
        stop_keeper(run, timeout_seconds=0.1)
    assert stop_keeper(run, timeout_seconds=0.1, kill=True)
    assert is_gone(pid)


@pytest.mark.parametrize("pid", ["0", "-1", "x", "9" * 20])
def test_a_parent_that_is_no_process_is_refused(folder: Path, pid: str) -> None:
    done = subprocess.run([*KEEPER, "a-run", f"--with-parent={pid}"], capture_output=True, text=True, check=False)
    assert (done.returncode, f"'{pid}' is not the number of a process" in done.stderr) == (2, True)
    assert not folder.exists()


def test_why_it_has_no_thread_is_said(run: str, folder: Path) -> None:
    code = (
        "import sys, threading; from dcp_memory.keeper.__main__ import main\n"
        "def refuse(thread): raise RuntimeError('no more threads')\n"
        "threading.Thread.start = refuse\n"
        "sys.exit(main([sys.argv[1], '--detach']))"
    )
    done = python(code, run)
    assert (done.returncode, done.stderr) == (1, "RuntimeError: no more threads\n")


def test_standard_streams_may_be_closed(run: str, folder: Path) -> None:
    """As in some schedulers: no file of the keeper gets the number of a stream, to which something may be written."""
    started = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", *KEEPER, run, "--detach"], check=False)
    assert started.returncode == 0
    assert stop_keeper(run)
    with subprocess.Popen(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *KEEPER, run]) as keeper:
        eventually(lambda: keeper_status(run))
        assert {os.readlink(f"/proc/{keeper.pid}/fd/{number}") for number in range(3)} == {os.devnull}
        stop_keeper(run)


def test_it_is_stopped_by_a_process_with_many_files(run: str, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2000, hard), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        start_keeper(run)
        assert stop_keeper(run)
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_options_of_the_environment(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_KEEPER_MAX_BYTES", "1.5M")
    monkeypatch.setenv("DCP_KEEPER_GENERATIONS", "5")
    monkeypatch.setenv("DCP_KEEPER_IDLE_TIMEOUT_SECONDS", "77")
    status = start_keeper(run)
    assert (status.max_bytes, status.generations, status.idle_timeout_seconds) == (3 << 19, 5, 77)


def test_a_relative_folder_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper in the background has another working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, "keepers")
    subprocess.run([*KEEPER, "a-run", "--detach"], check=True)
    assert (tmp_path / "keepers/a-run.sock").exists()
    assert stop_keeper("a-run")
    start_keeper("a-run")
    assert (tmp_path / "keepers/a-run.sock").exists()
    assert stop_keeper("a-run")
    assert [*(tmp_path / "keepers").iterdir()] == []


def test_the_default_folder_does_not_depend_on_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    within = folder_path()
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert folder_path() == within == f"/tmp/dcp-keeper-{os.geteuid()}"


def test_files_of_a_keeper_stay_young(folder: Path) -> None:
    """Many machines remove files in /tmp that nobody has touched for days."""
    folder.mkdir(mode=0o700)
    names = ["a-run.lock", "a-run.log", "another.log"]
    for name in names:
        (folder / name).touch()
        os.utime(folder / name, (1, 1))
    (folder / "a-run.sock").symlink_to("/nowhere")
    with KeeperFolder(str(folder)) as opened:
        opened.refresh("a-run")
    assert [(folder / name).stat().st_mtime == 1 for name in names] == [False, False, True]
    (folder / "a-run.sock").unlink()


def test_a_folder_within_one_of_all_users_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `/tmp`, and in a volume that the containers of a pod share."""
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setenv(FOLDER_VARIABLE, str(volume))
    with pytest.raises(KeeperRefusedError, match="can be written to by other users"):
        start_keeper("a-run")
    monkeypatch.setenv(FOLDER_VARIABLE, str(volume / "mine"))
    start_keeper("a-run")
    assert (volume / "mine").stat().st_mode & 0o777 == 0o700
    assert stop_keeper("a-run")


def test_folders_of_others_are_refused(run: str, folder: Path) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    for call in (start_keeper, keeper_status, stop_keeper):
        with pytest.raises((KeeperRefusedError, StorageError), match="can be written to by other users"):
            call(run)
    folder.rmdir()
    (folder.parent / "real").mkdir(mode=0o700)
    folder.symlink_to("real")
    with pytest.raises(KeeperRefusedError, match="is not a directory"):
        KeeperStore(run).list()
    folder.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_other_users_are_refused(run: str, folder: Path) -> None:
    pid = start_keeper(run).pid
    for path in [folder, *folder.parents]:
        if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
            path.chmod(0o755)
    (folder / f"{run}.sock").chmod(0o777)
    code = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.settimeout(20)
    print(connection.recv(1))
"""
    assert python(code, str(folder / f"{run}.sock"), str(USER)).stdout == "b''\n"
    os.chown(folder, USER, USER)
    with pytest.raises(KeeperRefusedError, match=f"belongs to the user with the number {USER}"):
        keeper_status(run)
    os.chown(folder, 0, 0)
    assert start_keeper(run).pid == pid
    # A keeper of another user in this user's folder.
    (folder / f"{run}.sock").rename(folder / "kept")
    code = """
import os, socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    os.setuid(int(sys.argv[2]))
    listener.listen()
    print(flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder / f"{run}.sock"), str(USER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(KeeperRefusedError, match=f"is a process of user {USER}"):
            keeper_status(run)
        other.communicate()
    (folder / "kept").rename(folder / f"{run}.sock")


def test_strangers_cost_nothing(run: str, folder: Path) -> None:
    """Connections that say nothing, garbage or half of something neither block others nor stay."""
    store = KeeperStore(run)
    store.publish("x", b"1")
    strangers = []
    for data in [b"", b"G", b"GET / HTTP/1.0\r\n\r\n", bytes(1000), b"DCPK\x01\x00\x00\x00" + b"\xff" * 12] * 40:
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(folder / f"{run}.sock"))
        stranger.sendall(data)
        strangers.append(stranger)
        assert store.read("x") == b"1"
    status = keeper_status(run)
    assert status is not None
    assert status.clients == 2
    descriptors = len(os.listdir(f"/proc/{status.pid}/fd"))
    assert descriptors < 100  # only the last of those that say nothing are kept
    for stranger in strangers:
        stranger.close()
    eventually(lambda: len(os.listdir(f"/proc/{status.pid}/fd")) < 20)


def test_it_goes_on_without_descriptors(run: str) -> None:
    """Clients beyond its limit of open files wait until others have gone; its memory leaves half of them to clients."""
    store = KeeperStore(run)
    store.publish("x", b"1")
    pid = start_keeper(run).pid
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (14, most))
    code = "import sys; from dcp_memory.client.store import KeeperStore; print(KeeperStore(sys.argv[1]).read('x'))"
    with ThreadPoolExecutor(4) as pool:
        assert {each.stdout for each in pool.map(lambda _: python(code, run), range(4))} == {"b'1'\n"}
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (40, most))
    sinks: list[Sink] = []

    def write() -> None:
        sinks.append(store.create(f"y{len(sinks)}"))
        sinks[-1].write([bytes(1 << 20)])

    with pytest.raises(StorageError, match="half of the open files"):
        eventually(write)
    assert len(sinks) >= 10
    for sink in sinks:
        sink.abort()
    assert python(code, run).stdout == "b'1'\n"
