"""Values of small objects, for `dcp show`: read without torch, and only where they are few."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcp_inspect.contents import Row, folder_of
from dcp_inspect.reading.stored_content import read_objects
from dcp_io import open_store, read_plain_object
from dcp_manifest import CheckpointIndex, DcpError, ItemKind, StoredItem, stored_objects

__all__ = ["with_values"]

_SMALL_OBJECT_BYTES = 4096
_MAX_VALUES = 1000


def with_values(path: str | os.PathLike[str], index: CheckpointIndex, rows: Sequence[Row]) -> list[Row]:
    """Add the values of small objects: numbers, text, and small containers of them, which need no torch.

    Others, objects that cannot be read, and more objects than anybody would look at, keep no value.

    Args:
        path: The checkpoint's folder or URI.
        index: Index of the checkpoint.
        rows: Rows of the index.
    """
    small = {row.name for row in rows if row.kind == "object" and row.stored_bytes <= _SMALL_OBJECT_BYTES}
    items = (
        {name: item for name, item in stored_objects(index) if name in small and item.kind is ItemKind.ARCHIVE}
        if 0 < len(small) <= _MAX_VALUES
        else {}
    )
    values = _plain_values(path, items)
    return [replace(row, value=values.get(row.name)) if row.name in values else row for row in rows]


def _plain_values(path: str | os.PathLike[str], items: Mapping[str, StoredItem]) -> dict[str, str]:
    if not items:
        return {}
    found: dict[str, str] = {}
    try:
        stored = read_objects(open_store(folder_of(path)), items)
    except (DcpError, OSError):  # `verify` says what is damaged; the index is whole
        return found
    for name, data in stored.items():
        with contextlib.suppress(ValueError):  # of a class, or with a tensor in it
            found[name] = repr(read_plain_object(data))
    return found
