from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time

import pytest

from dcp_io.saves.save_files import ProcessIdentity, this_process


def test_this_process_is_there():
    me = this_process()
    assert me.pid == os.getpid()
    assert not me.is_gone()
    assert ProcessIdentity.from_dict(me.to_dict()) == me


def test_a_child_is_there_until_it_ends_even_unreaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        there = dataclasses.replace(this_process(), pid=child.pid, start_ticks=0)
        assert not there.is_gone()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert there.is_gone()
    finally:
        child.kill()
        child.stdin.close()
        child.wait()
    assert there.is_gone()


ENDS_ITS_MAIN_THREAD = """
import ctypes, platform, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""


def test_a_process_whose_main_thread_has_ended_is_there():
    child = subprocess.Popen([sys.executable, "-c", ENDS_ITS_MAIN_THREAD])
    try:
        end = time.monotonic() + 60
        while state(child.pid) != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not dataclasses.replace(this_process(), pid=child.pid, start_ticks=0).is_gone()
    finally:
        child.kill()
        child.wait()


def state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_a_reused_number_is_another_process():
    me = this_process()
    assert dataclasses.replace(me, start_ticks=me.start_ticks - 1).is_gone()


@pytest.mark.parametrize("field", ["host", "boot_id", "pid_namespace"])
def test_nothing_is_known_of_other_machines(field):
    elsewhere = dataclasses.replace(this_process(), pid=2**22 + 1, **{field: "elsewhere"})
    assert not elsewhere.is_gone()


@pytest.mark.parametrize("pid", [0, -1])
def test_numbers_that_mean_groups_are_never_asked(pid):
    assert not dataclasses.replace(this_process(), pid=pid).is_gone()


def test_a_number_too_large_for_the_system_is_gone():
    assert dataclasses.replace(this_process(), pid=1 << 80).is_gone()


@pytest.mark.parametrize("change", [{"pid": "1"}, {"host": 3}, {"start_ticks": None}])
def test_damaged_identities_are_refused(change):
    with pytest.raises(TypeError):
        ProcessIdentity.from_dict({**this_process().to_dict(), **change})
