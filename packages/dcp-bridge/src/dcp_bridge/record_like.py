"""Convert dataclasses between stock and this project, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def record_like(kind: Callable[..., T], source: object, **changes: Any) -> T:
    """Return a `kind` with the fields of `source`, with changes.

    Fields that `kind` lacks are dropped; fields that `source` lacks get their defaults.
    """
    known = _field_names(kind)
    kept = {name: getattr(source, name) for name in known if name not in changes and hasattr(source, name)}
    return kind(**kept, **{name: value for name, value in changes.items() if name in known})


@cache
def _field_names(kind: Any) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
