"""The errors of ranks: what they say, and that they travel."""

from __future__ import annotations

import inspect
import pickle
import traceback

import pytest
import torch.distributed as dist

from dcp_ranks import CheckpointException, errors, make_coordinator
from dcp_ranks.phases.coordinator import LocalCoordinator
from dcp_ranks.transport.store_wire import StoreWire, guard_store
from integration_tests.kits.coordinators import caught

BUILTIN = {
    "CheckpointException": RuntimeError,
    "PeerLostError": ConnectionError,
    "CoordinatorTimeoutError": TimeoutError,
    "CoordinatorLostError": ConnectionError,
    "OperationError": RuntimeError,
}
EXAMPLES = [
    errors.CheckpointException(
        "phase 'plan' did not succeed", {3: (None, "text of 3"), 1: (OSError("full"), "text of 1")}
    ),
    errors.PeerLostError("write", [2], ["its process has ended"]),
    errors.CoordinatorTimeoutError("write", [1, 2], 3.0),
    errors.CoordinatorLostError("gone"),
    errors.OperationError("rank 0: 1; rank 1: 2"),
    errors.OperationError("it has ended"),
]


def test_each_is_a_ranks_error_a_builtin_and_described():
    for name in BUILTIN:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.RanksError)
        assert issubclass(kind, BUILTIN[kind.__name__])
        assert inspect.getdoc(kind)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_they_travel(error):
    twin = pickle.loads(pickle.dumps(error))
    assert (type(twin), str(twin)) == (type(error), str(error))
    for name in ("phase", "ranks", "how", "waited_seconds"):
        assert getattr(twin, name, None) == getattr(error, name, None)


def test_a_failed_phase_says_which_ranks_failed_and_why():
    error = EXAMPLES[0]
    assert [*error.failures] == [1, 3]
    assert str(error).startswith("phase 'plan' did not succeed (failed on ranks 1, 3): rank 1: ")
    assert "\n--- rank 1 ---\ntext of 1" in str(error)


def traceback_of(error):
    try:
        raise error
    except type(error):
        return traceback.format_exc()


@pytest.mark.parametrize("pickled", [True, False])
def test_equal_failures_are_told_once(pickled):
    full = {n: OSError(28, "No space left on device", f"/run/__{n}_0.abc.distcp") for n in range(64)}
    failures = {n: (error if pickled else None, traceback_of(error)) for n, error in full.items()}
    told = str(CheckpointException("phase 'write' did not succeed", failures))
    cause = "OSError: [Errno 28] No space left on device: '/run/__0_0.abc.distcp'"
    assert told.split("\n", maxsplit=1)[0] == f"phase 'write' did not succeed (failed on ranks 0-63): {cause}"
    assert told.count("Traceback") == 1
    assert "--- ranks 0-63 ---" in told
    failures[5] = (None, traceback_of(ValueError("another\n  one")))
    error = CheckpointException("it failed", failures)
    assert error.summary == f"ranks 0-4, 6-63: {cause}; rank 5: ValueError: another"
    assert str(error).count("Traceback") == 2
    assert [*error.failures] == [*range(64)]


def test_many_different_causes_do_not_fill_the_first_line():
    error = CheckpointException("it failed", {rank: (ValueError(f"key {rank}"), "") for rank in range(9)})
    assert error.summary.endswith("rank 1: ValueError: key 1; rank 2: ValueError: key 2; and 6 other failures")


def test_a_failure_of_an_inner_phase_is_told_by_its_causes():
    inner = CheckpointException("phase 'write' did not succeed", {1: (OSError("full"), "")})
    assert CheckpointException("the save failed", {0: (inner, "")}).summary == "rank 0: rank 1: OSError: full"


def test_a_lost_store_raises_its_error():
    class Gone:
        def __getattr__(self, name):
            def fail(*_):
                raise RuntimeError("Connection reset by peer")

            return fail

    assert type(caught(lambda: StoreWire(Gone(), "p/", 2).add("a", 0))) is errors.CoordinatorLostError
    with pytest.raises(errors.CoordinatorLostError, match="timed out"), guard_store("(connecting)"):
        raise RuntimeError("timed out")


def test_a_rank_that_is_alone_agrees_with_itself_and_raises_its_error():
    alone = LocalCoordinator()
    alone.agree("step", lambda: float("nan"), "steps")  # which is not equal to itself
    assert type(caught(lambda: alone.agree("step", lambda: 1 // 0, "steps"))) is ZeroDivisionError


def raised_on_ranks(rank):
    found = []
    with make_coordinator() as them:
        found.append(caught(lambda: them.agree("step", rank, "steps")))
        found.append(caught(lambda: them.barrier("after")))  # agreeing that they differ is no failure
    with make_coordinator() as them:
        found += [caught(lambda: them.all_gather("work", lambda: 1 // rank())), caught(lambda: them.barrier("after"))]
    return [type(error) for error in found]


def test_each_rank_raises_its_errors(ranks):
    expected = [
        errors.OperationError.__name__,
        "NoneType",
        errors.CheckpointException.__name__,
        errors.OperationError.__name__,
    ]
    for found in ranks.run(2, raised_on_ranks, dist.get_rank):
        assert [kind.__name__ for kind in found] == expected
