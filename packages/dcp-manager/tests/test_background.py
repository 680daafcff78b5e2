"""When the end of a save is reported, and on which ranks. The other rank is simulated; nothing is saved."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from dcp_core import CheckpointException, PeerLostError
from dcp_manager.background import BackgroundSaves, Tolerance, is_storage_failure

FULL = OSError("the disk is full")


class OtherRank:
    """Stands in for `Ranks` of two ranks: this rank, and another one with saves of its own."""

    alone = False
    rank = 0

    def __init__(self, saves: BackgroundSaves) -> None:
        self.saves = saves

    def combine(self, what: str, own: Callable[[], Any], function: Callable[[list[Any]], Any]) -> Any:
        del what
        told: list[Any] = [own()]

        class Second:
            alone = False
            rank = 1

            def combine(self, what: str, own: Callable[[], Any], function: Callable[[list[Any]], Any]) -> Any:
                del what, function
                told.append(own())
                return answer()

        def answer() -> Any:
            return function(told)

        self.second = self.saves.outcomes(Second())  # type: ignore[arg-type]
        return answer()


def begun(count: int) -> tuple[BackgroundSaves, list[Future[Any]]]:
    saves, futures = BackgroundSaves(), [Future[Any]() for _ in range(count)]
    for step, future in enumerate(futures, start=1):
        saves.add(saves.begin(), step, future, lambda saved: None)
    return saves, futures


def ask(first: BackgroundSaves, second: BackgroundSaves, late: BaseException | None = None) -> tuple[Any, Any]:
    """The outcomes that both ranks get, as steps and failed ranks; and the error for unfinished saves."""
    ranks = OtherRank(second)
    found, unfinished = first.outcomes(ranks, late)  # type: ignore[arg-type]

    def short(outcomes: list[Any]) -> list[tuple[int, list[int]]]:
        return [(each.step, [] if each.error is None else [*each.error.failures]) for each in outcomes]

    assert short(found) == short(ranks.second[0])
    return short(found), unfinished


def test_a_save_counts_once_and_when_it_has_ended_everywhere() -> None:
    (first, ours), (second, theirs) = begun(2), begun(2)
    theirs[0].set_exception(FULL)
    assert ask(first, second) == ([], None)
    assert second.steps == {2}
    ours[0].set_result(None)
    theirs[1].set_result(None)
    assert ask(first, second) == ([(1, [1])], None)
    ours[1].set_result(None)
    assert ask(first, second) == ([(2, [])], None)
    assert ask(first, second) == ([], None)


def test_a_save_that_did_not_begin_here_counts_as_well() -> None:
    (first, _), (second, theirs) = begun(0), begun(1)
    first.begin()
    theirs[0].set_exception(FULL)
    assert ask(first, second) == ([(1, [1])], None)


def test_who_is_late_does_not_hide_what_others_failed_with() -> None:
    (first, ours), (second, theirs) = begun(1), begun(1)
    theirs[0].set_exception(FULL)
    outcomes, unfinished = ask(first, second, TimeoutError("too long"))
    assert outcomes == []
    assert isinstance(unfinished, CheckpointException)
    assert {rank: text for rank, (_, text) in unfinished.failures.items()} == {
        0: "TimeoutError: too long",
        1: "OSError: the disk is full",
    }
    ours[0].set_result(None)
    assert ask(first, second) == ([(1, [1])], None)


FULL, BUG = OSError("the disk is full"), RuntimeError("a bug")


class OtherRanks:
    """Stands in for `Ranks`: this rank, and others whose answers the test sets."""

    alone = False

    def __init__(self, *others: dict[int, bool]) -> None:
        self.others = others

    def combine(self, what: str, own: Callable[[], Any], function: Callable[[list[Any]], Any]) -> Any:
        del what
        return function([own(), *self.others])


def failed(*causes: BaseException | None) -> CheckpointException:
    return CheckpointException("it failed", {rank: (cause, "text") for rank, cause in enumerate(causes)})


@pytest.mark.parametrize(
    ("error", "others", "passes"),
    [
        (failed(FULL), {}, True),
        (failed(BUG), {}, False),
        (failed(None), {0: True}, True),
        (failed(None), {0: False}, False),
        (failed(None), {}, False),
        (failed(FULL, None), {1: True}, True),
        (failed(FULL, None), {1: False}, False),
        (failed(FULL, None), {}, False),
        (FULL, {}, False),
    ],
)
def test_what_one_rank_knows_counts_for_all(error: Exception, others: dict[int, bool], passes: bool) -> None:
    assert Tolerance(OtherRanks(others), 1, "run/step-{}".format).passes(error) == passes  # type: ignore[arg-type]


def test_failures_in_a_row_are_counted() -> None:
    tolerance = Tolerance(OtherRanks(), 2, "run/step-{}".format)  # type: ignore[arg-type]
    assert [tolerance.passes(failed(FULL)) for _ in range(3)] == [True, True, False]
    tolerance.succeeded()
    assert tolerance.passes(failed(FULL))


def test_what_counts_as_the_storages() -> None:
    assert is_storage_failure(FULL)
    assert not is_storage_failure(BUG)
    assert not is_storage_failure(PeerLostError.__new__(PeerLostError))
