"""Serialization of objects (values that are not tensors) as `torch.save` archives, and safe loading.

Loading permits only the globals on an allow-list. Saving checks against the same list: an object that a later load
would refuse is reported when it is saved.
"""

from __future__ import annotations

import datetime as dt
import io
import pickle
import types
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_core.errors import (
    CorruptCheckpointError,
    DcpError,
    UnloadableObjectError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from dcp_core.objects.allowed_globals import (
    AllowList,
    allowed_globals,
    census_table,
    default_table,
    how_to_allow,
)
from dcp_core.objects.object_archive import ObjectArchive, read_archive
from dcp_manifest.pickles.pickle_table import ForbiddenGlobalError, UnsafePickleError

__all__ = [
    "DumpedObject",
    "UnloadableObjectWarning",
    "dump_object",
    "load_object",
    "load_tensor",
    "reduce_exactly",
    "report_unloadable",
    "scan",
]


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return reduce_exactly(value)


_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)
"""Replacement of the module `pickle` that is passed to `torch.save`."""


def reduce_exactly(value: object) -> Any:
    """Return the pickle reduction of an object that pickle protocol 2 would not restore exactly.

    These are times with a `fold`, which distinguishes the two occurrences of an hour when clocks are set back. Returns
    NotImplemented for all other objects. `torch.save` uses protocol 2.
    """
    if isinstance(value, dt.datetime | dt.time) and type(value) in (dt.datetime, dt.time) and value.fold:
        return value.__reduce_ex__(4)
    return NotImplemented


class UnloadableObjectWarning(UserWarning):
    """An object was saved that names globals which a load refuses unless `allow_globals` lists them."""


@dataclass(frozen=True, slots=True)
class DumpedObject:
    """Serialized form of an object, which takes the object's place in a state dict."""

    data: bytes
    """Bytes of the serialized object, from `dump_object`."""
    digest: bytes = b""
    """`value_digest` of the object, which is compared between ranks; empty if `data` is compared instead."""


def dump_object(value: object, *, key: str) -> bytes:
    """Serialize an object for a checkpoint, as `torch.save` does.

    Args:
        value: Object that can be pickled, or a `DumpedObject`. Tensors inside it are stored as by `torch.save`.
        key: FQN of the object, for error messages.

    Returns:
        Bytes of a `torch.save` archive.

    Raises:
        UnsupportedValueError: The object cannot be pickled.
    """
    if isinstance(value, DumpedObject):
        return value.data
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_PICKLE)
    except DcpError:
        raise
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} of type {type(value).__qualname__} cannot be saved: {error}; store plain data instead "
            "(numbers, strings, containers, tensors), or keep it out of the state dict"
        ) from error
    return buffer.getvalue()


def scan(data: bytes, *, allow_globals: Sequence[Any] = ()) -> list[str]:
    """Return the sorted full names of the globals for which `load_object` would refuse an object.

    The globals are neither imported nor called.

    Args:
        data: Bytes of the object, from `dump_object`.
        allow_globals: Globals that the later load will allow in addition to the default ones.

    Raises:
        CorruptCheckpointError: `data` is not a serialized object.
    """
    named: set[str] = set()
    try:
        _examine(data, allowed_globals(allow_globals), named)
    except UnsafePickleError as error:
        if not named:
            raise CorruptCheckpointError(f"the object {error}") from error
    except Exception as error:
        raise CorruptCheckpointError(f"the bytes of an object are damaged: {error}") from error
    return sorted(named)


def _examine(data: bytes, allowed: AllowList, named: set[str]) -> None:
    """Read a dumped object without its values, and without the user's classes; raises the errors that a load would.

    Args:
        data: Bytes of the object.
        allowed: Allow-list of the load.
        named: Set to which the globals are added that are not on the allow-list.
    """
    read_archive(
        data,
        census_table(allowed, named),
        lambda _, __, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage(),
    )


def report_unloadable(
    data: bytes,
    *,
    key: str,
    strict: bool = False,
    allow_globals: Sequence[Any] = (),
    reported: set[str] | None = None,
) -> None:
    """Warn about a serialized object that a later load would refuse; raise instead if `strict`.

    Args:
        data: Bytes of the object, from `dump_object`.
        key: FQN of the object, for the message.
        strict: Whether to raise instead of warning.
        allow_globals: Globals that the later load will allow in addition to the default ones.
        reported: Set of globals about which there was a warning already; the object's globals are added. None to warn
            about every global.

    Raises:
        UnloadableObjectError: A load would refuse the object, and `strict` is set.
    """
    if _is_plain(data):
        return
    refused: set[str] = set()
    reason = ""
    try:
        _examine(data, allowed_globals(allow_globals), refused)
    except Exception as error:  # noqa: BLE001 - whatever a load would raise
        reason = f"the stored object {error}"
    if refused:
        reason = f"it is made of {', '.join(sorted(refused))}. {how_to_allow(sorted(refused))}"
    elif reason:
        reason += ". Store plain data instead (numbers, strings, containers, tensors), or keep it out of the state dict"
        refused = {reason}
    if not refused:
        return
    message = f"{key!r} would not load back: {reason}"
    if strict:
        raise UnloadableObjectError(message)
    if reported is None or not refused <= reported:
        warnings.warn(message, UnloadableObjectWarning, stacklevel=2)
    if reported is not None:
        reported |= refused


class _Plain(pickle.Unpickler):
    """Unpickler of pickles without globals, so that nothing is called; only for bytes that this process has made."""

    def find_class(self, module: str, name: str) -> Any:
        raise ForbiddenGlobalError(f"{module}.{name}")


def _is_plain(data: bytes) -> bool:
    """Whether a dumped object certainly contains only plain values; may be False although it does."""
    try:
        pickled, start = ObjectArchive(data).pickled()
        stream = io.BytesIO(pickled)
        stream.seek(start)
        _Plain(stream).load()
    except Exception:  # noqa: BLE001 - then it is examined
        return False
    return True


def load_object(data: bytes, *, key: str, allow_globals: Sequence[Any] = (), trust_objects: bool = False) -> Any:
    """Unpickle an object that `dump_object` or stock has serialized, with only the globals on the allow-list.

    Args:
        data: Bytes of the serialized object.
        key: FQN of the object, for error messages.
        allow_globals: Classes and functions that the object may use in addition to the default ones and those added
            through `torch.serialization.add_safe_globals`; a pair (global, full name) allows a global under another
            name.
        trust_objects: Whether to unpickle without restriction, which lets the checkpoint run any code.

    Returns:
        The object; tensors in it are on the CPU.

    Raises:
        UnsafeCheckpointError: The object names a global that is not allowed; the message names the global and the
            argument that would allow it.
        CorruptCheckpointError: `data` is not a serialized object.
        ValueError: `allow_globals` contains a function that could run any code.
    """
    allowed = allowed_globals(allow_globals)
    try:
        if trust_objects:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
        return read_archive(data, allowed.table)
    except ForbiddenGlobalError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} names {error.path}, which is not allowed. {how_to_allow([error.path])}"
        ) from None
    except DcpError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(f"the stored object cannot be read: {error}", key=key) from error


def load_tensor(data: bytes | memoryview) -> torch.Tensor:
    """Load the tensor in a `torch.save` archive to the CPU.

    Args:
        data: Bytes of the archive; the tensor does not share their memory.

    Raises:
        Exception: The archive is damaged, contains no tensor of a torch class, or names a global that is not allowed.
    """
    tensor = read_archive(data, default_table())
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__qualname__} is stored where a tensor should be")
    return tensor.detach()
