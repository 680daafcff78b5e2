"""Base classes of the adapters."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Wrapper(Generic[W]):
    """Adapter of an object of the other library."""

    def __init__(self, wrapped: W) -> None:
        self.wrapped = wrapped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class Delegating(Wrapper[W]):
    """Adapter that forwards attributes, because some storages read a planner's `state_dict`."""

    def __getattr__(self, name: str) -> Any:
        # Copies and pickles look up attributes before `wrapped` exists.
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class StorageWrapper(Wrapper[W]):
    """Adapter of a storage reader or writer."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The wrapped storage's checkpoint id, or None."""
        found = getattr(self.wrapped, "checkpoint_id", None)
        return found if found is None or isinstance(found, str | os.PathLike) else str(found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: checkpoint ids never select an adapter."""
        del checkpoint_id
        return False
