"""Canonical bytes and digests of Python objects, and equality by type and bits, for caches and comparison of ranks.

`==` is not suitable: 0.0 equals -0.0, 1 equals True and 1.0, NaN differs from itself. Ordinary pickles are not suitable
either: they depend on which elements of a container are the same object, so they may differ between equal objects.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import numpy as np
import torch

from dcp_core.tensors.element_copy import contiguous
from dcp_core.tensors.tensor_bytes import tensor_bytes

__all__ = ["same_value", "value_bytes", "value_digest"]

_COMPARABLE = {int, bool, str, bytes, type(None)}
"""Types whose instances have the same bits if they are equal."""
_SETS = (pickle.EMPTY_SET, pickle.FROZENSET)


def same_value(one: Any, other: Any) -> bool:
    """Return whether two objects are equal by type and bits: 0.0 differs from -0.0, 1 from 1.0, and NaN equals NaN.

    Args:
        one: Any object. An object that cannot be pickled, or that contains itself, equals only itself.
        other: Object to compare with `one`.
    """
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) in _COMPARABLE:
        return bool(one == other)
    try:
        return value_bytes(one) == value_bytes(other)
    except Exception:  # noqa: BLE001 - what pickling raises is not ours to know
        return False


def value_bytes(value: Any) -> bytes:
    """Return canonical bytes of an object: equal for objects with the same type and bits, different for all others.

    Args:
        value: Object that can be pickled. The order of elements in a set is ignored; the order of keys in a dict
            matters.

    Raises:
        Exception: The object cannot be pickled, or contains itself.
    """
    data = _pickled(_Pickler, value)
    # The opcode may be a byte of something else: then the slow way gives bytes that identify the value as well.
    return _pickled(_SetPickler, value) if any(opcode in data for opcode in _SETS) else data


def value_digest(value: Any) -> bytes:
    """Return a digest of an object's `value_bytes`; empty if the object cannot be pickled or contains itself."""
    try:
        return hashlib.blake2b(value_bytes(value), digest_size=16).digest()
    except Exception:  # noqa: BLE001 - what pickling raises is not ours to know
        return b""


def _pickled(pickler: type[_Pickler], value: Any) -> bytes:
    into = io.BytesIO()
    pickler(into).dump(value)
    return into.getvalue()


class _Elements:
    """Stand-in in a pickle for a value that is identified by its elements alone."""


class _Pickler(pickle.Pickler):
    """Pickler that repeats shared parts, and pickles the elements of tensors and arrays rather than their storages."""

    def __init__(self, into: io.BytesIO) -> None:
        super().__init__(into, protocol=5)
        self.fast = True

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors and arrays to their elements; pickle calls this for all but the plainest types."""
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            return _Elements, (obj.dtype, obj.shape, obj.tobytes())
        if not isinstance(obj, torch.Tensor) or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        plain = contiguous(obj.detach().resolve_conj().resolve_neg().cpu())
        return _Elements, (type(obj).__name__, str(obj.dtype), tuple(obj.shape), bytes(tensor_bytes(plain)))


class _SetPickler(_Pickler):
    """Pickler that sorts the elements of sets, in an order that does not depend on the process."""

    def persistent_id(self, obj: Any) -> Any:
        """Replace sets; pickle calls this for every object."""
        if type(obj) in (set, frozenset):
            return type(obj).__name__, sorted(value_bytes(element) for element in obj)
        return None
