"""The commit protocol under seeded faults in virtual time, and mutants of it that the same seeds must find."""

from __future__ import annotations

from collections import Counter

import pytest

from integration_tests.robustness.virtual_faults import MUTANTS, PromiseBrokenError, planted, try_seed

SEEDS, NIGHTLY_SEEDS = 200, 10_000


def check(seeds: range) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found[try_seed(seed).partition(": ")[2]] += 1
        except PromiseBrokenError as error:
            raise PromiseBrokenError(f"seed {seed}: {error}") from error
    assert any(text.startswith("0 of") for text in found)
    assert any(text.startswith("4 of 4 ranks saved, value 2") for text in found)


def test_no_fault_breaks_a_promise() -> None:
    check(range(SEEDS))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_fault_of_many_breaks_a_promise() -> None:
    check(range(SEEDS, SEEDS + NIGHTLY_SEEDS))


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.filterwarnings("ignore")
def test_a_broken_protocol_is_found(mutant: str) -> None:
    try_seed(0)
    with planted(mutant), pytest.raises(PromiseBrokenError):
        check(range(SEEDS))


def test_a_seed_repeats_what_happened() -> None:
    assert [try_seed(seed) for seed in range(5)] == [try_seed(seed) for seed in range(5)]
