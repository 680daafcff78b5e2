"""The errors of ranks: what they say, that they travel, and that a library's own take their place."""

from __future__ import annotations

import dataclasses
import inspect
import pickle

import pytest
import torch.distributed as dist

from dcp_ranks import ERROR_TYPES, ErrorTypes, LocalCoordinator, StoreWire, errors, guard_store, make_coordinator
from dcp_ranks.testing.coordinators import caught

BUILTIN = {
    "PhaseFailedError": RuntimeError,
    "PeerLostError": ConnectionError,
    "CoordinatorTimeoutError": TimeoutError,
    "CoordinatorLostError": ConnectionError,
    "RankDisagreementError": ValueError,
    "OperationError": RuntimeError,
}
EXAMPLES = [
    errors.PhaseFailedError(
        "phase 'plan' did not succeed", {3: (None, "text of 3"), 1: (OSError("full"), "text of 1")}
    ),
    errors.PeerLostError("write", [2], ["its process has ended"]),
    errors.CoordinatorTimeoutError("write", [1, 2], 3.0),
    errors.CoordinatorLostError("gone"),
    errors.RankDisagreementError("rank 0: 1; rank 1: 2"),
    errors.OperationError("it has ended"),
]


class OwnError(Exception):
    """What users of a library catch."""


class OwnLostError(OwnError, errors.CoordinatorLostError):
    """The store is gone."""


class OwnDisagreementError(OwnError, errors.RankDisagreementError):
    """Different values."""


class OwnFailedError(OwnError, errors.PhaseFailedError):
    """A rank raised."""


class OwnOperationError(OwnError, errors.OperationError):
    """It has ended."""


OWN = ErrorTypes(
    phase_failed=OwnFailedError,
    coordinator_lost=OwnLostError,
    rank_disagreement=OwnDisagreementError,
    operation=OwnOperationError,
)


def test_each_is_a_ranks_error_a_builtin_and_described():
    kinds = {field.name: getattr(ERROR_TYPES, field.name) for field in dataclasses.fields(ErrorTypes)}
    assert {kind.__name__ for kind in kinds.values()} == {*BUILTIN}
    for kind in kinds.values():
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
    assert str(error).startswith("phase 'plan' did not succeed (failed on ranks 1, 3)\n--- rank 1 ---\ntext of 1")


def test_a_lost_store_raises_the_library_s_error():
    class Gone:
        def __getattr__(self, name):
            def fail(*_):
                raise RuntimeError("Connection reset by peer")

            return fail

    assert type(caught(lambda: StoreWire(Gone(), "p/", 2, errors=OWN).count("a"))) is OwnLostError
    with pytest.raises(OwnLostError, match="timed out"), guard_store("(connecting)", OWN):
        raise RuntimeError("timed out")


def test_a_rank_that_is_alone_raises_the_library_s_error():
    nan = float("nan")  # which is not equal to itself
    assert type(caught(lambda: LocalCoordinator(errors=OWN).agree("step", nan, "steps"))) is OwnDisagreementError


def raised_on_ranks(rank):
    found = []
    with make_coordinator(errors=OWN) as them:
        found.append(caught(lambda: them.agree("step", rank(), "steps")))
        found.append(caught(lambda: them.barrier("after")))  # agreeing that they differ is no failure
    with make_coordinator(errors=OWN) as them:
        found += [caught(lambda: them.all_gather("work", lambda: 1 // rank())), caught(lambda: them.barrier("after"))]
    return [type(error) for error in found]


def test_each_rank_raises_the_library_s_errors(ranks):
    expected = [OwnDisagreementError.__name__, "NoneType", OwnFailedError.__name__, OwnOperationError.__name__]
    for found in ranks.run(2, raised_on_ranks, dist.get_rank):
        assert [kind.__name__ for kind in found] == expected
