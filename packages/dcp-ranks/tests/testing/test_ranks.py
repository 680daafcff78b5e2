"""The rank launcher: what it ships, what it keeps, how it reports failures, and that it leaves no process behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist

from dcp_ranks.testing.ranks import RankError, RankPool
from integration_tests.kits.coordinators import group_store


class Own:
    """A class of a test module that cannot be imported by name."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Own and other.value == self.value

    __hash__ = None


def sum_of_ranks(own):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)  # by plain pickle, so the class must be importable on the ranks
    return Own((dist.get_rank(), dist.get_world_size(), total.item(), own.value, gathered == [own] * len(gathered)))


@pytest.mark.parametrize("world_size", [1, 4, 2])
def test_ranks_form_a_group(ranks, world_size):
    total = sum(range(world_size))
    found = ranks.run(world_size, sum_of_ranks, Own("x"))
    assert found == [Own((rank, world_size, total, "x", True)) for rank in range(world_size)]


def test_processes_are_kept(ranks):
    first = ranks(2, os.getpid)
    assert len(set(first)) == 2
    assert ranks(2, os.getpid) == first
    assert ranks(3, os.getpid)[:2] == first


def state(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]


def test_ranks_are_stopped_between_calls(ranks):
    pids = ranks(2, os.getpid)
    deadline = time.monotonic() + 100
    while any(state(pid) != "T" for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [state(pid) for pid in pids] == ["T", "T"]
    assert ranks(2, os.getpid) == pids


def test_ranks_that_keep_many_threads_are_replaced_with_the_group():
    def keep_threads():
        for _ in range(50):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        return os.getpid()

    with RankPool(2) as pool:
        pids = pool.run(2, keep_threads)
        assert pool.run(2, os.getpid) == pids
        assert pool.run(1, os.getpid) != pids[:1]


def test_closures_travel_and_calls_start_alike(ranks):
    offset = 7

    def dirty():
        os.environ["DCP_TEST_DIRTY"] = "1"
        os.chdir("/")
        torch.set_default_dtype(torch.float64)
        return torch.rand(1).item() + offset

    def state():
        return os.environ.get("DCP_TEST_DIRTY"), os.getcwd(), torch.get_default_dtype(), torch.rand(1).item() + offset

    before = ranks.run(2, state)
    ranks.run(2, dirty)
    assert ranks.run(2, state) == before
    assert before[0] == before[1]
    assert torch.get_num_threads() >= 1
    assert ranks.run(2, torch.get_num_threads) == [1, 1]


def test_functions_of_modules_that_only_the_caller_can_find(ranks, tmp_path, monkeypatch):
    path = tmp_path / "helper.py"
    path.write_text("WORDS = 'from afar'\nclass Kind: ...\ndef speak(): return WORDS, Kind")
    spec = importlib.util.spec_from_file_location("no-such.package.helper", path)
    module = importlib.util.module_from_spec(spec)
    for name in ("no-such", "no-such.package"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert ranks.run(2, module.speak) == [("from afar", module.Kind)] * 2


def test_no_group(ranks):
    assert ranks.run(2, dist.is_initialized, backend=None) == [False, False]
    assert ranks.run(2, dist.is_initialized) == [True, True]


def test_the_callers_warning_filters_hold(ranks):
    def warn():
        warnings.warn("mind the gap", UserWarning, stacklevel=1)
        return "went on"

    with pytest.raises(RankError, match="UserWarning: mind the gap"):
        ranks.run(1, warn)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mind")
        assert ranks.run(1, warn) == ["went on"]


def fails_on(rank, error):
    print(f"rank {dist.get_rank()} prints this")
    if dist.get_rank() == rank:
        raise error


def test_an_error_shows_ranks_tracebacks_and_output(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(2, fails_on, 1, LookupError("not there"))
    assert list(caught.value.failures) == [1]
    assert isinstance(caught.value.failures[1].exception, LookupError)
    assert caught.value.__cause__ is caught.value.failures[1].exception
    text = str(caught.value)
    assert "fails_on failed on rank 1" in text
    assert "raise error" in text
    assert "LookupError: not there" in text
    assert "rank_worker.py" not in text
    for rank in range(2):
        assert f"rank {rank} prints this" in text
    assert ranks.run(2, lambda: "fine") == ["fine", "fine"]


def test_a_group_is_kept_until_a_call_fails(ranks):
    def known():
        store = group_store()
        dist.barrier()
        found = store.check(["mine"])
        dist.barrier()
        store.set("mine", "yes")
        return found

    ranks.run(2, known)
    assert ranks.run(2, known) == [True, True]
    with pytest.raises(RankError):
        ranks.run(2, fails_on, 1, ValueError())
    assert ranks.run(2, known) == [False, False]


def test_only_the_output_of_this_call_is_shown(ranks):
    ranks.run(2, lambda: print("an earlier call"))
    with pytest.raises(RankError) as caught:
        ranks.run(2, fails_on, 1, ValueError())
    assert "an earlier call" not in str(caught.value)


@pytest.mark.parametrize("error_type", [SystemExit, KeyboardInterrupt])
def test_an_interrupt_does_not_end_the_process(ranks, error_type):
    pids = ranks.run(2, os.getpid)
    with pytest.raises(RankError, match=error_type.__name__):
        ranks.run(2, fails_on, 0, error_type("out"))
    assert ranks.run(2, os.getpid) == pids


def test_what_cannot_be_pickled_is_an_error(ranks):
    with pytest.raises(RankError, match="cannot pickle"):
        ranks.run(1, threading.Lock)
    assert ranks.run(1, lambda: "fine") == ["fine"]


def stuck_on(rank):
    if dist.get_rank() == rank:
        time.sleep(1000)


def test_a_stuck_rank_is_reported_with_its_stack_and_replaced(ranks):
    ranks.run(2, stuck_on, None)  # this module is imported there now
    pids = ranks.run(2, os.getpid)
    with pytest.raises(RankError) as caught:
        ranks.run(2, stuck_on, 1, timeout_seconds=10)
    assert list(caught.value.failures) == [1]
    assert "did not finish in time" in str(caught.value)
    assert "in stuck_on" in str(caught.value)
    again = ranks.run(2, os.getpid)
    assert again[0] == pids[0]
    assert again[1] != pids[1]


def dies(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def test_a_death_is_an_error_unless_it_is_expected(ranks):
    with pytest.raises(RankError, match=r"rank 1(.|\n)*killed by SIGKILL"):
        ranks.run(3, dies, 1)
    assert ranks.run(3, dies, 1, expect_death=[1]) == [0, None, 2]
    with pytest.raises(RankError, match="expected to die, but did not"):
        ranks.run(3, dies, None, expect_death=[2])
    assert ranks.run(3, dies, None) == [0, 1, 2]


def test_a_rank_can_be_killed_from_outside(ranks):
    assert ranks.run(2, stuck_on, 1, kill_after_seconds={1: 0.2}, expect_death=[1]) == [None, None]
    assert ranks.run(2, dies, None, kill_after_seconds={1: 1000.0}) == [0, 1]


def test_world_size_is_checked(ranks):
    with pytest.raises(ValueError, match="world_size is 5"):
        ranks.run(5, os.getpid)


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        return state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ends while it is read
        return False


def wait_for_end(pids):
    deadline = time.monotonic() + 100
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def test_close_ends_the_processes():
    with RankPool(1) as pool:
        pids = pool.run(1, os.getpid)
        assert alive(pids[0])
    assert not alive(pids[0])


def test_ranks_start_again_after_the_process_that_forks_them_was_killed():
    with RankPool(1) as pool:
        (before,) = pool.run(1, os.getppid)  # which is not this process
        assert before != os.getpid()
        os.kill(before, signal.SIGKILL)
        assert wait_for_end([before]) == []
        (after,) = pool.run(1, os.getppid)
    assert after != before


HOLDER = """
import sys, os, time
from dcp_ranks.testing.ranks import RankPool
pool = RankPool(2)
print(*pool.run(2, os.getpid), flush=True)
pool.run(2, time.sleep, 1000, timeout_seconds=1000)
"""


def test_no_process_outlives_the_one_that_started_it():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        holder.kill()
    assert wait_for_end(pids) == []
