"""The benchmark of formats runs, and measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.benchmarks.command_start import COMMANDS
from integration_tests.benchmarks.formats import CASES, compare, lines


@pytest.mark.slow
def test_every_case_runs(tmp_path: Path) -> None:
    results = compare(mib=4, rounds=1, folder=str(tmp_path))
    assert {*CASES} < {*results}
    for case, sides in results.items():
        assert case == "the command" or sides["ours"]["ratio"] > 0
        assert all(figures["seconds"] > 0 for figures in sides.values())
    assert [*results["the command"]] == [f"dcp {command}" for command in COMMANDS]
    text = "\n".join(lines(results))
    assert all(f"| {case} |" in text for case in CASES)
    assert 1 <= results["safetensors onto 4 ranks"]["ours"]["read_ratio"] <= 1.1
    assert list(tmp_path.iterdir()) == []
