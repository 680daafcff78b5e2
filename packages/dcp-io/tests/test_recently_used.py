"""`RecentlyUsed`: what is evicted, and what counts as a use."""

from __future__ import annotations

import pytest

from dcp_io.recently_used import RecentlyUsed


def test_the_least_recently_used_value_is_evicted() -> None:
    cache: RecentlyUsed[str, int] = RecentlyUsed(2)
    assert cache.put("a", 1) == cache.put("b", 2) == []
    assert cache.get("a") == 1
    assert cache.put("c", 3) == ["b"]
    assert (cache.get("a"), cache.get("b"), cache.get("c"), len(cache)) == (1, None, 3, 2)


def test_a_value_that_is_put_again_counts_as_used() -> None:
    cache: RecentlyUsed[str, int] = RecentlyUsed(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        cache.put(key, value)
    assert cache.put("c", 4) == ["b"]
    assert cache.get("a") == 3


@pytest.mark.parametrize(
    ("sizes", "evicted"), [((1, 1, 1, 1), []), ((9, 9), []), ((4, 4, 4), [0]), ((2, 2, 2, 9), [0, 1])]
)
def test_light_values_stay_beyond_the_size(sizes: tuple[int, ...], evicted: list[int]) -> None:
    cache: RecentlyUsed[int, bytes] = RecentlyUsed(2, weigh=len, free_weight=8)
    found = [key for number, size in enumerate(sizes) for key in cache.put(number, bytes(size))]
    assert found == evicted


def test_drop_and_clear_remove_values() -> None:
    cache: RecentlyUsed[str, int] = RecentlyUsed(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.drop("a")
    cache.drop("missing")
    assert (cache.get("a"), len(cache)) == (None, 1)
    cache.clear()
    assert len(cache) == 0
