"""Base classes of the adapters, which delegate to a wrapped object."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

__all__ = ["Delegating", "StorageWrapper", "Wrapper"]

W = TypeVar("W")


class Wrapper(Generic[W]):
    """Base class of adapters: an adapter of the object `wrapped`.

    Args:
        wrapped: Object of the other library.
    """

    def __init__(self, wrapped: W) -> None:
        self.wrapped = wrapped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class Delegating(Wrapper[W]):
    """Adapter that also has the attributes of `wrapped`, since some storages read a planner's `state_dict`."""

    def __getattr__(self, name: str) -> Any:
        # Called for what is not found otherwise; copies and pickles ask before there is anything.
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class StorageWrapper(Wrapper[W]):
    """Base class of adapters of a storage reader or writer."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """Checkpoint id of the wrapped storage, as a string or path; None if it has no id."""
        found = getattr(self.wrapped, "checkpoint_id", None)
        return found if found is None or isinstance(found, str | os.PathLike) else str(found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: an adapter is never selected by a checkpoint id."""
        del checkpoint_id
        return False
