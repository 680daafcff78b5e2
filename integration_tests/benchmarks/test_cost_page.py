"""The page about costs says what was measured, and the README the same."""

from __future__ import annotations

import pytest

from integration_tests.benchmarks.cost_page import MODULE, PAGE, lines
from integration_tests.benchmarks.figures import faster


def test_the_page_says_what_was_measured() -> None:
    _, _, rest = PAGE.read_text().partition(f"<!-- figures: python -m {MODULE} -->")
    figures, ended, _ = rest.partition("<!-- end of figures -->")
    assert ended
    assert figures.strip().splitlines() == list(lines()), f"run python -m {MODULE}"


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (0.477, "2.1 × faster"),
        (0.0466, "21 × faster"),
        (0.1, "10 × faster"),
        (0.8, "1.2 × faster"),
        (1.5, "1.5 × slower"),
    ],
)
def test_ratios_of_times_are_said_as_speedups(ratio: float, said: str) -> None:
    assert faster(ratio) == said
