"""Which steps lead to a warning, are refused or are allowed. No checkpoint is saved here."""

from __future__ import annotations

import pytest

from dcp_manager import LowerSteps, StepWentBackError
from dcp_manager.policies.lower_steps import StepGuard

# The highest checkpoint, what is being saved, the step to be saved, whether it is too low.
CASES = [
    (None, (), 0, False),
    (20, (), 21, False),
    (20, (), 20, False),
    (20, (), 19, True),
    (20, (), 0, True),
    (None, (5,), 4, True),
    (None, (5,), 5, False),
    (20, (30,), 25, True),
    (10**20, (), 10**20 - 1, True),
]


@pytest.mark.parametrize(("highest", "running", "step", "low"), CASES)
@pytest.mark.parametrize("policy", ["warn", "raise", "allow"])
def test_a_lower_step(
    policy: LowerSteps,
    highest: int | None,
    running: tuple[int, ...],
    step: int,
    low: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = StepGuard("run/step-{}".format, policy)
    if low and policy == "raise":
        with pytest.raises(StepWentBackError, match=f"step {step} is lower than step .*dcp rm run/step-"):
            guard.check(step, highest, running)
    else:
        guard.check(step, highest, running)
    assert (f"take step {max((*running, highest or 0))}, not step {step}" in caplog.text) == (low and policy == "warn")


def test_reaching_the_highest_from_below_replaces_it(caplog: pytest.LogCaptureFixture) -> None:
    guard = StepGuard("run/step-{}".format, "warn")
    for step, said in ((8, ""), (6, "step 6 is lower"), (8, "run/step-8 is replaced"), (9, ""), (8, "")):
        caplog.clear()
        guard.check(step, 8)
        assert said in caplog.text
        assert bool(said) == bool(caplog.text), step


@pytest.mark.parametrize(
    ("policy", "restored", "published", "spares"),
    [
        ("warn", None, 5, True),
        ("warn", 5, 6, False),
        ("warn", 8, 2, True),  # restored, and began at 0 nevertheless
        ("allow", None, 5, False),
        ("raise", None, 5, True),
    ],
)
def test_higher_steps_are_left_behind_on_purpose_only(
    policy: LowerSteps, restored: int | None, published: int, spares: bool
) -> None:
    guard = StepGuard("run/step-{}".format, policy)
    if restored is not None:
        guard.restored(restored)
    assert guard.spares_higher(published) == spares


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="lower_steps is 'ignore'; choose"):
        StepGuard("run/step-{}".format, "ignore")  # type: ignore[arg-type]
