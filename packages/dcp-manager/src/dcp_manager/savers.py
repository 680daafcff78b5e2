"""What a manager expects of a saver that saves in the background. Savers themselves are other packages'."""

from __future__ import annotations

from typing import Any, Protocol

__all__ = ["Saver"]


class Saver(Protocol):
    """What saves in the background: `dcp_async.AsyncSaver`, or anything of that shape."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Any:
        """Copy the state and save the copy; a future of the metadata, or what has one as `upload_completion`.

        `place` is a `checkpoint_id` or a `storage_writer`.
        """
        ...
