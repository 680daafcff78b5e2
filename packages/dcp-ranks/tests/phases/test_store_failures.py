"""Phases on real ranks, of which one fails or differs: all raise, and the next operation works."""

from __future__ import annotations

import pickle
import signal
import threading
import time
import uuid

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import (
    CheckpointException,
    CoordinatorTimeoutError,
    OperationError,
)
from integration_tests.kits.coordinators import (
    KINDS,
    STORE_KINDS,
    caught,
    coordinator,
    every_failure_is_heard,
    hear,
    leftover_keys,
    say,
)


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class PickyError(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, text, more):
        super().__init__(text)


class MuteError(Exception):
    """Cannot even be described."""

    def __str__(self):
        raise RuntimeError("no words")


class BombError(Exception):
    """Its pickling raises something unusual."""

    def __reduce__(self):
        raise RecursionError("pickling goes wrong")


class Unloadable:
    """Pickles, and raises wherever it is unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("not here")


def raise_(error):
    """Raise within an expression."""
    raise error


def fail_in_map(kind, failing, make_error):
    rank = dist.get_rank()
    with coordinator(kind) as them:
        them.barrier("before")
        with every_failure_is_heard():
            error = caught(
                lambda: them.all_gather("write", lambda: raise_(make_error(rank)) if rank in failing else rank)
            )
        after = caught(lambda: them.barrier("after"))
    with coordinator(kind) as them:  # the group is fine
        assert them.all_gather("next", lambda: rank) == list(range(dist.get_world_size()))
    return error, error.__cause__, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (1, 3), (0, 1, 2, 3)])
def test_an_error_is_raised_on_every_rank(ranks, kind, failing):
    found = ranks.run(4, fail_in_map, kind, failing, lambda rank: ValueError(f"bad {rank}"))
    for rank, (error, cause, after) in enumerate(found):
        assert type(error) is CheckpointException
        assert tuple(error.failures) == failing
        for failed in failing:
            exception, text = error.failures[failed]
            assert repr(exception) == f"ValueError('bad {failed}')"
            assert "raise_(make_error(rank))" in text
            assert text.rstrip() in str(error)
        assert "'write'" in str(error)
        assert f"rank {failing[0]}" in str(error)
        assert repr(cause) == (f"ValueError('bad {rank}')" if rank in failing else "None")
        assert isinstance(after, OperationError)
        assert "ended" in str(after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error_type", [LockedError, PickyError, MuteError, BombError])
def test_an_exception_that_cannot_travel_is_reported_as_text(ranks, kind, failing, error_type):
    arguments = ("original words", "more") if error_type is PickyError else ("original words",)
    found = ranks.run(3, report_of, kind, failing, error_type, arguments)
    for rank, (texts, exceptions, kinds) in enumerate(found):
        assert list(texts) == [failing]
        assert error_type.__name__ in texts[failing]
        assert error_type is MuteError or "original words" in texts[failing]
        assert exceptions[failing] == (error_type.__name__ if rank == failing or error_type is MuteError else None)
        assert kinds == CheckpointException.__name__


def report_of(kind, failing, error_type, arguments):
    with coordinator(kind) as them:
        error = caught(
            lambda: them.all_reduce(
                "write",
                lambda: raise_(error_type(*arguments)) if them.rank == failing else 1,
                sum,
            )
        )
    texts = {rank: text for rank, (_, text) in error.failures.items()}
    names = {rank: type(one).__name__ if one is not None else None for rank, (one, _) in error.failures.items()}
    return texts, names, type(error).__name__


def fail_elsewhere(kind, where):
    with coordinator(kind, coordinator_rank=1) as them:
        calls = {
            "reduce": lambda: them.all_reduce("p", lambda: 1, lambda values: values[5]),
            "scatter": lambda: them.reduce_scatter("p", lambda: 1, lambda values: values[:-1]),
            "broadcast": lambda: them.broadcast("p", lambda: 1 / 0),
            "unpicklable value": lambda: them.all_gather("p", lambda: threading.Lock() if them.rank == 2 else 1),
            "unpicklable answer": lambda: them.all_reduce("p", lambda: 1, lambda _: threading.Lock()),
            "unloadable value": lambda: them.all_gather("p", lambda: Unloadable() if them.rank == 2 else 1),
        }
        return caught(calls[where])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "failed", "words"),
    [
        ("reduce", 1, "IndexError"),
        ("scatter", 1, "2 results for 3 ranks"),
        ("broadcast", 1, "ZeroDivisionError"),
        ("unpicklable value", 2, "cannot pickle"),
        ("unpicklable answer", 1, "cannot pickle"),
        ("unloadable value", 1, "not here"),
    ],
)
def test_errors_beside_the_map_function(ranks, kind, where, failed, words):
    for error in ranks.run(3, fail_elsewhere, kind, where):
        assert isinstance(error, CheckpointException)
        assert list(error.failures) == [failed]
        assert words in str(error)


def interrupted(kind, error_type, where):
    with coordinator(kind) as them:
        if where == "map":
            return caught(lambda: them.all_gather("write", lambda: raise_(error_type("stop")) if them.rank == 1 else 1))
        return caught(lambda: them.all_reduce("write", lambda: 1, lambda _: raise_(error_type("stop"))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error_type", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("where", "stopped"), [("map", 1), ("reduce", 0)])
def test_an_interrupt_passes_through_and_the_others_hear_of_it(ranks, kind, error_type, where, stopped):
    found = ranks.run(3, interrupted, kind, error_type, where)
    assert type(found.pop(stopped)) is error_type
    for error in found:
        assert type(error) is CheckpointException
        assert list(error.failures) == [stopped]
        assert error_type.__name__ in str(error)


def test_an_interrupt_while_waiting_is_heard_by_the_others(ranks):
    def call():
        with make_coordinator() as them:
            if them.rank == 1:
                signal.signal(signal.SIGALRM, lambda *_: raise_(KeyboardInterrupt("alarm")))
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            error = caught(lambda: them.all_gather("p", lambda: hear(word) if them.rank == 2 else None))
            say(word)
            return error

    word = uuid.uuid4()
    found = ranks.run(3, call)
    assert type(found[1]) is KeyboardInterrupt
    for error in (found[0], found[2]):
        assert type(error) is CheckpointException
        assert list(error.failures) == [1]


def one_fails_while_another_is_busy(kind, failing, busy, word):
    def work():
        if them.rank == busy:
            hear(word)
        if them.rank == failing:
            # Only the busy one is late: the others have said that they wait, however slowly they came.
            said = "here" if kind == "relay" else "up"
            others = {*range(them.world_size)} - {failing, busy}
            keys = [f"{them._steps - 1}/{said}/{rank}" for rank in others]
            assert them._wire.wait(lambda: them._wire.has(*keys), time.monotonic() + 40)
            raise ValueError("it fails")
        return 1

    with coordinator(kind) as them:
        error = caught(lambda: them.all_gather("p", work))
        say(word)
    return error, leftover_keys()


@pytest.mark.parametrize("kind", STORE_KINDS)
@pytest.mark.parametrize(("failing", "busy"), [(0, 2), (1, 2), (1, 0), (3, 2)])
def test_nobody_waits_for_a_busy_rank_once_another_has_failed(ranks, kind, failing, busy):
    for error, left in ranks.run(4, one_fails_while_another_is_busy, kind, failing, busy, uuid.uuid4()):
        assert type(error) is CheckpointException
        assert list(error.failures) == [failing]
        assert f"rank {busy} had not finished" in str(error)
        assert left == []


def disagree(kind, what):
    with coordinator(kind) as them:
        if what == "value":
            return caught(lambda: them.agree("start", lambda: "b" if them.rank == 2 else "a", "checkpoint ids"))
        if what == "phase":
            return caught(lambda: them.barrier("load" if them.rank == 2 else "save"))
        return caught(lambda: them.all_gather("p", lambda: 1) if them.rank == 2 else them.barrier("p"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("value", "different checkpoint ids: ranks 0-1, 3: 'a'; rank 2: 'b'"),
        ("phase", "ranks 0-1, 3: barrier 'save'; rank 2: barrier 'load'"),
        ("move", "ranks 0-1, 3: barrier 'p'; rank 2: all_gather 'p'"),
    ],
)
def test_disagreement_is_named_on_every_rank(ranks, kind, what, words):
    for error in ranks.run(4, disagree, kind, what):
        assert type(error) is OperationError
        assert words in str(error)


def raises_between_phases():
    with make_coordinator() as them:
        them.barrier("first")
        if them.rank == 1:
            raise KeyError("between")
        them.barrier("second")


def test_an_error_between_phases_reaches_the_other_ranks(ranks):
    def call():
        return caught(raises_between_phases), leftover_keys()

    found = ranks.run(3, call)
    assert type(found[1][0]) is KeyError
    assert all(left == [] for _, left in found)
    for error, _ in (found[0], found[2]):
        assert type(error) is CheckpointException
        assert list(error.failures) == [1]
        assert "between" in str(error)


def test_errors_survive_pickling():
    error = CoordinatorTimeoutError("plan", [1, 2], 3.0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.phase) == (str(error), (1, 2), "plan")
