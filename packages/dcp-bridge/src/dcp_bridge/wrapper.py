"""What all adapters have in common: the object that they stand for."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

__all__ = ["Delegating", "Wrapper"]

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
