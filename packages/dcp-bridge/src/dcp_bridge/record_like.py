"""Conversion of a record of one library to the other's, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

__all__ = ["record_like"]

T = TypeVar("T")


def record_like(kind: Callable[..., T], source: object, **changes: Any) -> T:
    """Make a record with the fields of another record, some of them changed.

    Args:
        kind: Dataclass of the new record. Fields that it lacks, as in older versions of stock, are left out.
        source: Record of the other library. Fields that it lacks have their defaults in the new record.
        changes: Values that replace those of `source`.
    """
    known = _field_names(kind)
    kept = {name: getattr(source, name) for name in known if name not in changes and hasattr(source, name)}
    return kind(**kept, **{name: value for name, value in changes.items() if name in known})


@cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
