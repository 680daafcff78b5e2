"""`KeepWaiting`: a policy for the first tier, which keeps checkpoints until they have been promoted."""

from __future__ import annotations

from collections.abc import Sequence

from dcp_io import CheckpointRecord, KeepPolicy
from dcp_tiers.waiting import TieredRoot, steps_to_send

__all__ = ["KeepWaiting"]


class KeepWaiting(KeepPolicy):
    """Policy for the first tier that keeps each checkpoint that a further tier must still get.

    Combined with another policy, it keeps a slow or absent tier from losing checkpoints: what that tier's own policy
    would drop anyway is not kept for it. Only the first tier is asked, so that retention waits for no far storage.

    Args:
        tiers: The tiers of the run; the policy is for the first of them.

    Example:
        ```python
        from dcp_io import KeepLast
        from dcp_manager import CheckpointManager
        from dcp_tiers import KeepWaiting, Tier, Tiers
        from dcp_tiers.promote import promote

        tiers = Tiers([Tier("near"), Tier("far")])
        with CheckpointManager("near", keep_policy=KeepLast(1) | KeepWaiting(tiers)) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
            assert len(manager.checkpoints()) == 3  # the far tier has none of them yet
            promote(tiers)
            manager.save(4, {"step": 4})
            assert [record.step for record in manager.checkpoints()] == [4]
        ```
    """

    def __init__(self, tiers: TieredRoot) -> None:
        self._tiers = tiers

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps that some further tier must still get."""
        del records, now_seconds
        return set().union(*(steps_to_send(self._tiers, further, 0) for further in range(1, len(self._tiers.tiers))))
