"""The proof on the training of the demo: FSDP2 on two ranks, resumed on two, one and four."""

from __future__ import annotations

import pytest

from dcp_prove import ResumeError, prove_resume
from integration_tests.resume.demo import DemoTrainer, WithoutStep


@pytest.mark.slow
@pytest.mark.timeout(1800)  # eleven processes that import torch
def test_the_demo_resumes_exactly() -> None:
    report = prove_resume(DemoTrainer, steps=5, kill_at=2, world_sizes=(2, 1, 4))
    assert [result.exact for result in report.results] == [True, False, False]
    assert any("mean losses of 3 steps" in line for result in report.results[1:] for line in result.compared)


@pytest.mark.slow
def test_a_lost_number_of_steps_is_a_lost_position() -> None:
    with pytest.raises(ResumeError, match="reads the batches of step 1 again") as caught:
        prove_resume(WithoutStep, steps=4, kill_at=2, world_sizes=2)
    assert caught.value.report.omissions == ["position"]
