"""When policies save: rules, and signals with the handlers of the program."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dcp_manager import EverySeconds, EverySteps, OnRequest, OnSignal, SavePolicy
from dcp_manager.save_policies import Moment, SignalWatch


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (EverySteps(10), Moment(10, 0), True),
        (EverySteps(10), Moment(11, 0), False),
        (EverySteps(10), Moment(0, 0), False),
        (EverySteps(10, first=0), Moment(0, 0), True),
        (EverySteps(10, first=25), Moment(20, 0), False),
        (EverySteps(10, first=25), Moment(30, 0), True),
        (EverySeconds(60), Moment(1, 59.9), False),
        (EverySeconds(60), Moment(1, 60), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGTERM})), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGUSR1})), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGUSR2})), False),
        (OnRequest(), Moment(1, 0, requested=True), True),
        (OnRequest(), Moment(1, 0), False),
        (EverySteps(7) | OnRequest(), Moment(7, 0), True),
        (EverySteps(7) | OnRequest(), Moment(8, 0, requested=True), True),
        (EverySteps(7) | OnRequest(), Moment(8, 0), False),
    ],
)
def test_due(policy: SavePolicy, moment: Moment, due: bool) -> None:
    assert policy.due(moment) == due


def test_what_combinations_need() -> None:
    assert EverySteps(2).same_everywhere
    assert (EverySteps(2) | EverySteps(3)).same_everywhere
    mixed = EverySteps(2) | OnSignal(frozenset({signal.SIGUSR1}), frozenset())
    assert not mixed.same_everywhere
    assert (mixed.signals, mixed.stop_signals) == ({signal.SIGUSR1}, frozenset())
    assert OnSignal().stop_signals == {signal.SIGTERM}


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        EverySteps(0)
    with pytest.raises(ValueError, match="more than 0"):
        EverySeconds(0)
    for arguments in ((signal.SIGUSR1,), (frozenset({signal.SIGUSR1}), signal.SIGTERM)):
        with pytest.raises(TypeError, match="a set of signals"):
            OnSignal(*arguments)  # type: ignore[arg-type]


came: list[int] = []


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    came.clear()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    watch = SignalWatch({signal.SIGTERM, signal.SIGUSR1}, {signal.SIGTERM})
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, before)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_first_one_here_is_noted_though_others_were_heard_of(watch: SignalWatch) -> None:
    watch.heard_of_stop()
    heard = watch.stopped_at
    send()
    assert came == []
    assert watch.noted == {signal.SIGTERM}
    assert watch.stopped_at == heard  # what is left of the time counts from the first signal anywhere
    send()
    assert came == [signal.SIGTERM]


def test_others_may_come_again_and_again(watch: SignalWatch) -> None:
    for _ in range(3):
        send(signal.SIGUSR1)
    assert watch.noted == {signal.SIGUSR1}
    assert watch.stopped_at is None
    send()
    assert came == []
    assert watch.stopped_at is not None


def make(*stop: int) -> SignalWatch:
    watch = SignalWatch({signal.SIGTERM, signal.SIGUSR1}, stop)
    watch.start()
    return watch


@pytest.fixture
def before() -> Iterator[object]:
    """A handler of the program, from before all managers."""

    def handler(number: int, frame: object) -> None:
        came.append(number)

    came.clear()
    there = signal.signal(signal.SIGTERM, handler)
    try:
        yield handler
    finally:
        signal.signal(signal.SIGTERM, there)


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_managers_end_in_any_order(before: object, order: tuple[int, ...]) -> None:
    watches = [make(signal.SIGTERM) for _ in range(3)]
    for left, number in zip((2, 1, 0), order, strict=True):
        watches[number].stop()
        assert (signal.getsignal(signal.SIGTERM) is before) == (left == 0)
    send()
    assert came == [signal.SIGTERM]
    assert not any(watch.noted for watch in watches)


def test_each_manager_hears_of_a_signal() -> None:
    watches = [make(signal.SIGTERM), make()]
    send()
    assert [watch.noted for watch in watches] == [{signal.SIGTERM}] * 2
    for watch in watches:
        watch.stop()


@pytest.mark.parametrize("calls_the_one_before", [True, False])
def test_a_later_handler_of_the_program_stays(before: object, calls_the_one_before: bool) -> None:
    watch = make(signal.SIGTERM)
    ours = signal.getsignal(signal.SIGTERM)
    later: list[int] = []

    def handler(number: int, frame: object) -> None:
        later.append(number)
        if calls_the_one_before and callable(ours):
            ours(number, None)

    signal.signal(signal.SIGTERM, handler)
    second = make(signal.SIGTERM)
    send()
    assert watch.noted == second.noted == {signal.SIGTERM}
    assert later == came == []
    watch.stop()
    second.stop()
    assert signal.getsignal(signal.SIGTERM) is handler
    send()
    assert later == [signal.SIGTERM]
    assert came == [signal.SIGTERM] * calls_the_one_before


def test_a_later_handler_that_calls_ours_lives_on_without_one_before() -> None:
    there = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        watch = make(signal.SIGTERM)
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)

        def later(number: int, frame: object) -> None:
            ours(number, None)

        signal.signal(signal.SIGTERM, later)
        send()
        assert watch.noted == {signal.SIGTERM}
        watch.stop()
        send()  # the default action would end this process
    finally:
        signal.signal(signal.SIGTERM, there)


def test_a_manager_that_is_dropped_records_nothing_any_more(before: object) -> None:
    make(signal.SIGTERM)
    gc.collect()
    send()
    assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_may_stop_a_watch(before: object) -> None:
    watch = make(signal.SIGTERM)
    thread = threading.Thread(target=watch.stop)
    thread.start()
    thread.join()
    send()
    assert came == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("action", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_actions_are_restored(action: signal.Handlers) -> None:
    there = signal.signal(signal.SIGUSR1, action)
    watch = make()
    send(signal.SIGUSR1)
    assert watch.noted == {signal.SIGUSR1}
    watch.stop()
    assert signal.getsignal(signal.SIGUSR1) == action
    signal.signal(signal.SIGUSR1, there)


def test_a_handler_of_c_code_is_restored() -> None:
    libc, there = ctypes.CDLL(None), signal.getsignal(signal.SIGUSR1)
    received = ctypes.c_int()
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)

    @kind
    def handler(number: int) -> None:
        received.value += 1

    libc.signal(signal.SIGUSR1, handler)
    real = signal.getsignal
    try:
        with pytest.MonkeyPatch.context() as patch:  # Python says None only of handlers that it finds at its own start
            patch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR1 else real(number))
            watch = make()
        send(signal.SIGUSR1)
        assert watch.noted == {signal.SIGUSR1}
        watch.stop()
        send(signal.SIGUSR1)
        assert received.value == 1
    finally:
        signal.signal(signal.SIGUSR1, there)


CHILDREN = """
import multiprocessing, os, signal, sys, threading, time
from dcp_manager.save_policies import SignalWatch

fork = multiprocessing.get_context("fork")
kind, closed = sys.argv[1], sys.argv[2] == "closed"
if kind == "python":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
elif kind == "ignored":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
watches = [SignalWatch({signal.SIGTERM}, {signal.SIGTERM}) for _ in range(2)]
for watch in watches:
    watch.start()
if kind == "later":
    ours = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: (ours(number, frame), os._exit(8)))
if closed:
    watches[0].stop()

def child(pipe):
    pipe.send(1)
    for _ in range(10 if kind == "ignored" else 6000):
        time.sleep(0.1)  # a Python handler waits until a call that began just after the signal ends

def start():
    here, there = fork.Pipe()
    process = fork.Process(target=child, args=(there,))
    process.start()
    here.recv()
    process.terminate()
    process.join()
    print(process.exitcode)

start()
thread = threading.Thread(target=start)
thread.start()
thread.join()
if kind == "default":  # a pool that handles or ignores the signal may hang without a manager too
    with fork.Pool(2) as pool:
        pool.map_async(time.sleep, [600, 600])
print(0 if kind == "later" or not any(watch.noted for watch in watches) else 1)
if kind != "later":
    os.kill(os.getpid(), signal.SIGTERM)  # the parent still has its managers
    print([len(watch.noted) for watch in watches])
"""


@pytest.mark.parametrize(
    ("kind", "closed", "code"),
    [
        ("default", "open", -15),
        ("default", "closed", -15),
        ("python", "open", 7),
        ("ignored", "open", 0),
        ("later", "closed", 8),
    ],
)
def test_a_forked_child_ends_as_without_a_manager(kind: str, closed: str, code: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", CHILDREN, kind, closed]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.split("\n")
    assert told[:3] == [str(code), str(code), "0"]
    if kind != "later":
        assert told[3] == ("[0, 1]" if closed == "closed" else "[1, 1]")


EARLY = """
import os, signal, sys, time

def stop_at_once():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)

os.register_at_fork(after_in_child=stop_at_once)  # runs before the hook of the managers, which is registered later
from dcp_manager.save_policies import SignalWatch

if sys.argv[1] == "python":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
watch = SignalWatch({signal.SIGTERM}, {signal.SIGTERM})
watch.start()
child = os.fork()
if not child:
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(watch.noted))
os.kill(os.getpid(), signal.SIGTERM)
print(len(watch.noted), signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


@pytest.mark.parametrize(("kind", "code"), [("default", -15), ("python", 7)])
def test_a_signal_that_comes_before_a_forked_child_is_ready_ends_it(kind: str, code: int) -> None:
    command = [sys.executable, "-W", "ignore", "-c", EARLY, kind]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, check=True).stdout
    assert told.split("\n")[:2] == [f"{code} 0", "1 set()"]
