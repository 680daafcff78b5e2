"""`RootPlaces`: the places of a manager's root, with a catalogue of each, and the root's promoter if it has one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dcp_core.toolkit import absolute_id
from dcp_io import Catalogue, KeepAll, KeepPolicy, PromotingRoot, Root, Store, open_store, places_of
from dcp_manager.together import Ranks

__all__ = ["RootPlaces"]


class RootPlaces:
    """Places of a root, the nearest first; checkpoints are saved to the first.

    Args:
        root: Path, URI or `Root`.
        storage_options: Options of the storage of a path or URI.
        stale_after_seconds: See `CheckpointManager`.
        folder_prefix: Prefix of folder names; a root with a prefix of its own uses that.
    """

    def __init__(
        self,
        root: Root | str | os.PathLike[str],
        storage_options: Mapping[str, Any],
        stale_after_seconds: float,
        folder_prefix: str,
    ) -> None:
        self._promoting = root if isinstance(root, PromotingRoot) else None
        if isinstance(root, str | os.PathLike):
            self.url = os.fspath(absolute_id(root)).rstrip("/") or "/"
            stores: tuple[Store, ...] = (open_store(self.url, storage_options=storage_options),)
        else:
            stores = places_of(root)
            self.url = stores[0].url.rstrip("/") or "/"
        if self._promoting is not None:
            folder_prefix = self._promoting.folder_prefix
        self.catalogues = tuple(
            Catalogue(store, stale_after_seconds=stale_after_seconds, folder_prefix=folder_prefix) for store in stores
        )

    def checkpoint_id(self, catalogue: Catalogue, step: int) -> str:
        """Return the id of a step's checkpoint in the place of a catalogue."""
        url = self.url if catalogue is self.catalogues[0] else catalogue.store.url.rstrip("/")
        return f"{url}/{catalogue.folder_name(step)}"

    def keep_policy(self, given: KeepPolicy | None) -> KeepPolicy:
        """Return the policy for the first place: the given one; None is the root's own, or to keep all.

        What another place must still get is kept even if the given policy does not select it.
        """
        own = KeepAll() if self._promoting is None else self._promoting.keep_policy
        if given is None:
            return own
        return given if self._promoting is None else given | self._promoting.keep_waiting

    def start(self, ranks: Ranks) -> None:
        """Start the promoter, on the coordinator."""
        if self._promoting is not None and ranks.is_coordinator:
            self._promoting.start_promoter()

    def saved(self) -> None:
        """Wake the promoter after a save. Ranks: the coordinator."""
        if self._promoting is not None:
            self._promoting.wake_promoter()

    def end(self, ranks: Ranks, seconds: float) -> None:
        """Wait for the promoter on the coordinator, at most `seconds`."""
        if self._promoting is not None and ranks.is_coordinator:
            self._promoting.end_promoter(seconds)
