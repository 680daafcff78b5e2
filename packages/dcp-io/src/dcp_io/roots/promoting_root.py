"""`PromotingRoot`: protocol of a root whose checkpoints are copied from its first place to the others by a process."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dcp_io.roots.keeping_rules import KeepPolicy
from dcp_io.stores.root import Root

__all__ = ["PromotingRoot"]


@runtime_checkable
class PromotingRoot(Root, Protocol):
    """Protocol of a root of several places with a promoter, which a checkpoint manager starts, wakes and ends.

    Ranks: the coordinator calls the methods; none is collective.
    """

    @property
    def folder_prefix(self) -> str:
        """Prefix of checkpoint folder names, before the step."""
        ...

    @property
    def keep_policy(self) -> KeepPolicy:
        """Policy for the first place; it keeps what the others must still get, too."""
        ...

    @property
    def keep_waiting(self) -> KeepPolicy:
        """Policy that keeps in the first place what the others must still get, and nothing else."""
        ...

    def make_room(self, step: int, *, hurry: bool) -> bool:
        """Make room in the first place for a step; returns False if the save should wait and ask again.

        Args:
            step: The step that is about to be saved.
            hurry: Whether the save cannot wait.
        """
        ...

    def start_promoter(self) -> None:
        """Start the promoter, unless it runs; it looks for what waits from earlier runs. A failure is logged."""
        ...

    def wake_promoter(self) -> None:
        """Make the promoter look for new checkpoints; starts it if it has ended."""
        ...

    def end_promoter(self, seconds: float) -> object:
        """Wait for the promoter to bring everything to the other places; it goes on alone after `seconds`."""
        ...
