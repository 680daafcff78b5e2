"""`TimeLimits`: how long saves and their ranks may take, now or after a signal that ends the training."""

from __future__ import annotations

from dcp_manager.policies.on_signal import SignalWatch

__all__ = ["TimeLimits"]


class TimeLimits:
    """Limits of the time that a manager waits.

    Args:
        watch: Watch of the signals that end the training.
        preemption_seconds: Time from such a signal until the process is killed; None for no limit.
        close_seconds: Limit for background saves without such a signal.
        timeout_seconds: Limit of the time that ranks wait for each other in one phase.
    """

    def __init__(
        self, watch: SignalWatch, preemption_seconds: float | None, close_seconds: float, timeout_seconds: float
    ) -> None:
        self._watch = watch
        self._preemption_seconds = preemption_seconds
        self._close_seconds = close_seconds
        self._timeout_seconds = timeout_seconds

    @property
    def ends_soon(self) -> bool:
        """Whether there is a limit after a signal that ends the training."""
        return self._preemption_seconds is not None

    def waiting(self, seconds: float | None = None) -> tuple[float, str]:
        """Return how long to wait for background saves from now on, and the name of the option that says so.

        Args:
            seconds: The caller's own limit; None for that of the options.
        """
        left = self._watch.seconds_left(self._preemption_seconds)
        limit, setting = (self._close_seconds, "close_seconds") if left is None else (left, "preemption_seconds")
        return (limit if seconds is None else seconds), setting

    def phase(self) -> float:
        """Return how long ranks may wait for each other in a phase of a save from now on."""
        left = self._watch.seconds_left(self._preemption_seconds)
        return self._timeout_seconds if left is None else min(left, self._timeout_seconds)
