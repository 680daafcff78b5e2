"""Base classes of the adapters: they hold the wrapped object and delegate to it."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

__all__ = ["Delegating", "StorageWrapper", "Wrapper"]

W = TypeVar("W")


class Wrapper(Generic[W]):
    """Adapter of the object `wrapped`.

    Args:
        wrapped: Object of the other library.
    """

    def __init__(self, wrapped: W) -> None:
        self.wrapped = wrapped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class Delegating(Wrapper[W]):
    """Adapter whose missing attributes are those of `wrapped`: some storages read a planner's `state_dict`."""

    def __getattr__(self, name: str) -> Any:
        # Called for what is not found otherwise; copies and pickles ask before there is anything.
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class StorageWrapper(Wrapper[W]):
    """Adapter of the other library's storage reader or writer."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The checkpoint id of the wrapped storage, as text unless it is text or a path; None if there is no id."""
        found = getattr(self.wrapped, "checkpoint_id", None)
        return found if found is None or isinstance(found, str | os.PathLike) else str(found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: adapters are never chosen for an id."""
        del checkpoint_id
        return False
