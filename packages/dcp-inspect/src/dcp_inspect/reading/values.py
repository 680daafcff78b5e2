"""Values of checkpoints and files of every format: numbers as numpy arrays, objects as Python values.

Checkpoints are read without torch where their bytes allow it; see `stored_content`. Everything else needs torch and
`dcp-format`, which are imported here, by the commands that meet such values.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
from typing import Any

import numpy.typing as npt

from dcp_inspect.contents import folder_of, open_index
from dcp_inspect.errors import OtherFormatError
from dcp_inspect.places import is_uri
from dcp_inspect.reading.arrays import array_of
from dcp_inspect.reading.other_formats import formats, open_other_format
from dcp_inspect.reading.stored_content import StoredContent, stored_content
from dcp_io import open_store, read_plain_object
from dcp_manifest import CheckpointNotFoundError, UnsupportedFormatError

__all__ = ["array_rows", "load_value", "open_values", "same_value", "whole_array"]

Array = npt.NDArray[Any]
_READ_BYTES = 64 << 20
_COMPRESSED = "reading compressed tensors, and objects that hold tensors,"


def open_values(path: str | os.PathLike[str]) -> Any:
    """Open a checkpoint or file as content: a `StoredContent`, or a `dcp_format.Content` of another format.

    Raises:
        CheckpointNotFoundError: There is nothing at `path`, or nothing that is known.
        UnsupportedFormatError: No installed converter recognises the format, or dcp-format is missing.
    """
    try:
        return _open_checkpoint(os.fspath(path))
    except OtherFormatError:
        return open_other_format(path)
    except CheckpointNotFoundError:
        if is_uri(path) or not os.path.isdir(path):
            raise
        try:  # a plug-in may know the folder's format
            return open_other_format(path)
        except UnsupportedFormatError:
            pass
        raise


def _open_checkpoint(path: str) -> StoredContent:
    index = open_index(path)
    path = folder_of(path)
    return stored_content(open_store(path), index, lambda: formats(_COMPRESSED).open_content(path))


def whole_array(entry: Any) -> Array:
    """Read a whole tensor into memory; see `array_of` for its dtype."""
    return array_of(bytearray().join(entry.data.pieces(_READ_BYTES)), entry.dtype, entry.shape)


def array_rows(entry: Any, start: int, stop: int) -> Array:
    """Read rows [start, stop) of a tensor with at least one dimension; reads only these rows if the format allows."""
    if getattr(entry.data, "rows", None) is None:
        return whole_array(entry)[start:stop]
    return array_of(bytearray(entry.data.rows(start, stop)), entry.dtype, (stop - start, *entry.shape[1:]))


def load_value(data: bytes, name: str) -> Any:
    """Return the value of a stored object.

    Raises:
        UnsafeCheckpointError: The object names a class or function that is not allowed.
        CorruptCheckpointError: The bytes are no stored object.
        UnsupportedFormatError: The object needs torch, and dcp-format is not installed.
    """
    try:
        return read_plain_object(data)
    except ValueError:
        formats(f"the object {name!r} is no plain number, text or container, and reading it")
        return importlib.import_module("dcp_core.objects.object_bytes").load_object(data, key=name)


def same_value(one: Any, other: Any) -> bool:
    """Whether two objects are equal by type and bits: 0.0 is not -0.0, 1 is neither True nor 1.0, NaN is itself."""
    with contextlib.suppress(Exception):  # what cannot be pickled plainly is compared by the core
        pair = [_pickled(one), _pickled(other)]
        # The opcodes may be bytes of something else; sets are compared regardless of their order.
        if not any(opcode in data for data in pair for opcode in (pickle.EMPTY_SET, pickle.FROZENSET)):
            return pair[0] == pair[1]
    formats("comparing these objects")
    return bool(importlib.import_module("dcp_core.planning.comparable_bytes").same_value(one, other))


class _PlainPickler(pickle.Pickler):
    """Pickler of plain values, which repeats shared parts, so that equal values give equal bytes."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        """Refuse everything that is not plain; pickle calls this for all but the plainest types."""
        raise TypeError(type(obj).__name__)


def _pickled(value: Any) -> bytes:
    into = io.BytesIO()
    _PlainPickler(into).dump(value)
    return into.getvalue()
