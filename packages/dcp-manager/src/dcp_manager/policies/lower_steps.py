"""Policy for saves of a lower step than the highest checkpoint, after a restart or rollback: warn, refuse or allow."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, get_args

from dcp_manager.errors import StepWentBackError
from dcp_manifest import library_logger

__all__ = ["LowerSteps", "StepGuard"]

_log = library_logger(__name__)

LowerSteps = Literal["warn", "raise", "allow"]


class StepGuard:
    """Check of each step to be saved against the highest step under the root.

    Args:
        name: Function that returns the checkpoint id of a step in the first place.
        policy: For a lower step, `warn` logs a warning and makes retention keep the higher steps; `raise` refuses the
            save; `allow` does nothing.

    Raises:
        ValueError: `policy` is none of the three names.

    Ranks: the coordinator.
    """

    def __init__(self, name: Callable[[int], str], policy: LowerSteps) -> None:
        if policy not in get_args(LowerSteps):
            raise ValueError(f"lower_steps is {policy!r}; choose 'warn', 'raise' or 'allow'")
        self._name = name
        self.policy: LowerSteps = policy
        """The policy."""
        self._went_back = False
        self._restored: int | None = None

    def restored(self, step: int) -> None:
        """Record the step from which training was resumed; higher steps count as abandoned on purpose."""
        self._restored = step

    def check(
        self, step: int, highest: int | None, running: Collection[int] = (), beyond: tuple[int, str] | None = None
    ) -> None:
        """Compare a step with the highest checkpoint, before the step is saved.

        Args:
            step: The step to be saved.
            highest: Highest step with an undamaged checkpoint in the first place; None if there is none.
            running: Steps that this process is saving.
            beyond: Highest step in a further place, and its checkpoint id there; None if there is none.

        Raises:
            StepWentBackError: The step is lower, and the policy is `raise`.
        """
        top = max((*running, step if highest is None else highest))
        place = self._name(top)
        if beyond is not None and beyond[0] > top:
            highest, place = beyond
            top = highest
        self._went_back &= step <= top
        replaces = step == highest and self._went_back
        if self.policy == "allow" or not (step < top or replaces):
            return
        message = _message(step, top, place)
        if self.policy == "raise":
            raise StepWentBackError(message)
        self._went_back = True
        _log.warning("%s", message)

    def spares_higher(self, step: int) -> bool:
        """Whether retention must keep undamaged checkpoints of higher steps after `step` was published."""
        on_purpose = self._restored is not None and self._restored <= step
        return self.policy != "allow" and not on_purpose


def _message(step: int, top: int, place: str) -> str:
    root = place.rpartition("/")[0]
    if step == top:
        return f"{place} is replaced by a training that went back to lower steps"
    return (
        f"step {step} is lower than step {top}, which is in {root}: the next restore() and latest() take "
        f"step {top}, not step {step}. If training began again by mistake, stop it and restore first. If it went "
        f"back on purpose, remove the higher steps (dcp rm {place}) or use another root; with lower_steps='allow' "
        "nothing is said"
    )
