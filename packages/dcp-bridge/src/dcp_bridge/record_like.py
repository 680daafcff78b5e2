"""Conversion of records (dataclasses) between stock and this project, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

__all__ = ["record_like"]

T = TypeVar("T")


def record_like(kind: Callable[..., T], source: object, **changes: Any) -> T:
    """Return a record of another class with the fields of `source`.

    Args:
        kind: Dataclass of the new record. Fields of `source` that `kind` lacks (older versions of stock have fewer) are
            left out.
        source: Record of the other library. Fields that `source` lacks get their defaults in the new record.
        changes: Fields of the new record with other values than in `source`.
    """
    known = _field_names(kind)
    kept = {name: getattr(source, name) for name in known if name not in changes and hasattr(source, name)}
    return kind(**kept, **{name: value for name, value in changes.items() if name in known})


@cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
