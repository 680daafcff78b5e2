"""Protocol of background savers for the manager; other packages, such as `dcp_async`, implement it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from dcp_core import Metadata

__all__ = ["Saver", "future_of"]


class Saver(Protocol):
    """Protocol of a background saver: `dcp_async.AsyncSaver`, or any object with a method `save`."""

    def save(self, state_dict: dict[str, Any], *, process_group: Any, no_dist: bool, **place: Any) -> Any:
        """Begin to save a copy of the state dict in the background.

        Besides the named arguments, one of `checkpoint_id` and `storage_writer` is passed.

        Returns:
            A future of the metadata, or an object whose `upload_completion` is such a future.
        """
        ...


def future_of(answer: Any) -> Future[Metadata]:
    """Return the future in `answer`, the return value of `Saver.save`; it is done when the checkpoint exists.

    Args:
        answer: The future itself, or an object whose attribute `upload_completion` is the future.
    """
    future: Future[Metadata] = getattr(answer, "upload_completion", answer)
    return future
