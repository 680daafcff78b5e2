"""Protocol of background savers for the manager. The savers themselves are in other packages."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Saver"]


class Saver(Protocol):
    """A saver in the background: `dcp_async.AsyncSaver`, or any object with this method."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Any:
        """Save a copy of the state; returns a future of the metadata, or an object with `upload_completion`.

        Exactly one keyword argument is passed as `place`: `checkpoint_id` or `storage_writer`.
        """
        ...
