"""How simple the product is: no figure is worse than its bound."""

from __future__ import annotations

import pytest

from integration_tests.call_paths.figures import BOUNDS, measure_figures, table


@pytest.mark.timeout(1800)  # it reads all modules, and measures in several processes
def test_no_figure_is_worse_than_its_bound() -> None:
    found = measure_figures()
    assert found.keys() == BOUNDS.keys()
    worse = [name for name, number in found.items() if number > BOUNDS[name][0]]
    assert worse == [], f"worse than their bounds: {worse}\n{table(found)}"
