"""How simple the product is: no figure is worse than its bound."""

from __future__ import annotations

import pytest
import torch

from integration_tests.call_paths.figures import BOUNDS, measure_figures, table
from integration_tests.call_paths.walk import PAGE, listed, measure_second_save, walk_lines


@pytest.mark.timeout(1800)  # it reads all modules, and measures in several processes
def test_no_figure_is_worse_than_its_bound() -> None:
    found = measure_figures()
    assert found.keys() == BOUNDS.keys()
    worse = [name for name, number in found.items() if number > BOUNDS[name][0]]
    assert worse == [], f"worse than their bounds: {worse}\n{table(found)}"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="a save then passes the modules of devices, too")
def test_the_page_lists_the_modules_of_a_second_save() -> None:
    remedy = "run: python -m integration_tests.call_paths --write-page"
    assert listed(PAGE.read_text()) == walk_lines(measure_second_save()), remedy
