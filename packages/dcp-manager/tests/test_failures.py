"""The coordinator decides whether a failure is tolerated, from the reports of all ranks. No process groups here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_core import CheckpointException, PeerLostError
from dcp_manager.failures import Tolerance, is_storage_failure

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
    assert Tolerance(OtherRanks(others), 1).passes(error) == passes  # type: ignore[arg-type]


def test_failures_in_a_row_are_counted() -> None:
    tolerance = Tolerance(OtherRanks(), 2)  # type: ignore[arg-type]
    assert [tolerance.passes(failed(FULL)) for _ in range(3)] == [True, True, False]
    tolerance.succeeded()
    assert tolerance.passes(failed(FULL))


def test_what_counts_as_the_storages() -> None:
    assert is_storage_failure(FULL)
    assert not is_storage_failure(BUG)
    assert not is_storage_failure(PeerLostError.__new__(PeerLostError))
