"""What all adapters have in common: the object that they stand for."""

from __future__ import annotations

import os
from typing import Any, Generic, TypeVar

__all__ = ["Delegating", "StorageWrapper", "Wrapper"]

W = TypeVar("W")


class Wrapper(Generic[W]):
    """Stands for `wrapped`.

    Args:
        wrapped: The other library's object.
    """

    def __init__(self, wrapped: W) -> None:
        self.wrapped = wrapped

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r})"


class Delegating(Wrapper[W]):
    """An adapter whose missing attributes are those of `wrapped`: storages look at a planner's `state_dict`."""

    def __getattr__(self, name: str) -> Any:
        # Called for what is not found otherwise; copies and pickles ask before there is anything.
        if name == "wrapped" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.wrapped, name)


class StorageWrapper(Wrapper[W]):
    """A storage reader or writer that stands for the other library's."""

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The wrapped storage's own, as text if it is neither text nor a path; None if it does not tell."""
        found = getattr(self.wrapped, "checkpoint_id", None)
        return found if found is None or isinstance(found, str | os.PathLike) else str(found)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: no id leads here by itself."""
        del checkpoint_id
        return False
