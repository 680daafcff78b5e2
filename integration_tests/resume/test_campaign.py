"""200 random draws of loop, omission, kill and numbers of ranks: what is left out is named, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration_tests.resume.campaign import Draw
from integration_tests.resume.proofs import prove

DRAWS = [Draw(number) for number in range(200)]
# Each draw starts three processes or more: few of them gate, on one rank.
GATING = [draw for draw in DRAWS[:10] if draw.sizes == (1,)]


@pytest.mark.parametrize(
    "draw", [draw if draw in GATING else pytest.param(draw, marks=pytest.mark.slow) for draw in DRAWS], ids=str
)
def test_what_is_left_out_is_named(tmp_path: Path, draw: Draw) -> None:
    options = {"omit": draw.omit, **draw.options}
    report = prove(draw.loop, tmp_path, draw.sizes, steps=draw.steps, kill_at=draw.kill_at, **options)
    assert report.omissions == ([] if draw.omit is None else [draw.omit]), str(report)
    assert report.ok is (draw.omit is None)
    assert [result.world_size for result in report.results] == [*draw.sizes]
