"""The figures of devices: they can be measured, and the page prints those of the reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.devices.figures import ROWS, measure, read_reports, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "accelerators.md"


@pytest.mark.device
def test_a_device_can_be_measured(device: str, tmp_path: Path) -> None:
    report = measure(device, 1 << 16, folder=tmp_path)
    assert table([report]).count("\n") == len(ROWS) + 1
    assert all(report[key] > 0 for key in ROWS if key.endswith("by_floor") and key != "lost_by_floor")


def test_the_page_has_the_figures_of_the_reports() -> None:
    assert table(read_reports()) in PAGE.read_text()
