"""Every kind of value, saved by one library on some ranks and loaded by the other on as many or fewer or more.

All kinds of one round run in one call on the ranks; each test looks at one kind of one round.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest

from integration_tests.oracle.kinds import KINDS
from integration_tests.oracle.rounds import Outcome, load_all, save_all

pytestmark = pytest.mark.interop

# (who saves, in which layout, who loads)
DIRECTIONS = [
    ("ours", "torch", "ours"),
    ("ours", "raw", "ours"),
    ("ours", "torch", "stock"),
    ("stock", "torch", "ours"),
]
# (ranks that save, ranks that load, sharding that is loaded)
ROUTES = [
    (1, 1, "same"), (2, 2, "same"), (4, 4, "same"), (2, 2, "other"), (4, 4, "other"),
    (1, 4, "same"), (4, 1, "same"), (2, 4, "other"), (4, 2, "other"),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcome(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """The merged outcome of a round: what went wrong on any rank for each kind."""

    @lru_cache
    def saved(saver: str, layout: str, world: int) -> tuple[str, Outcome]:
        folder = str(tmp_path_factory.mktemp(f"{saver}-{layout}-{world}"))
        return folder, merged(ranks.run(world, save_all, folder, saver, layout))

    @lru_cache
    def loaded(saver: str, layout: str, loader: str, route: tuple[int, int, str]) -> Outcome:
        folder, result = saved(saver, layout, route[0])
        return result | merged(ranks.run(route[1], load_all, folder, saver, loader, route[2]))

    return loaded


def merged(outcomes: list[Outcome]) -> Outcome:
    result: Outcome = {}
    for rank, outcome in enumerate(outcomes):
        for kind, text in outcome.items():
            if text != "ok":
                result[kind] = f"rank {rank}: {text}"
            else:
                result.setdefault(kind, text)
    return result


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route[0]}to{route[1]}-{route[2]}")
@pytest.mark.parametrize("direction", DIRECTIONS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_bit_equal(
    outcome: Callable[..., Outcome], kind: Any, direction: tuple[str, str, str], route: tuple[int, int, str]
) -> None:
    saver, layout, loader = direction
    result = outcome(saver, layout, loader, route)
    unable = (saver == "stock" and not kind.stock_saves) or (loader == "stock" and not kind.stock_loads)
    if unable:
        assert kind.name not in result or loader == "stock"
        return
    assert result[kind.name] == "ok", result[kind.name]
