"""Serialize objects (values that are not tensors) as `torch.save` archives, and load them safely.

Loads permit only globals on an allow-list.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import io
import itertools
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data

from dcp_core.errors import (
    CorruptCheckpointError,
    DcpError,
    UnsafeCheckpointError,
    UnsupportedValueError,
)
from dcp_core.objects.allowed_globals import (
    CLASS_METHOD,
    AllowList,
    allowed_globals,
    as_expression,
    census_table,
    default_allow_list,
    how_to_allow,
    register_library,
)
from dcp_core.records.protocols import is_stateful
from dcp_core.shards.shards import is_shard
from dcp_core.tensors.kinds import SCALARS
from dcp_io.archives.archive_checks import ZipRecord, inflated, refuse_bomb, zip_records
from dcp_io.archives.zip_format import LOCAL, local_lengths
from dcp_manifest.pickles.pickle_table import Budget, ForbiddenGlobalError, PickleTable, UnsafePickleError
from dcp_manifest.pickles.safe_pickle import read_pickle, refuse_unfolding

_LOOKED_AT = 1000
_CACHED_BYTES = 256
_PLAIN = SCALARS | {bytes, torch.Tensor}
_DATA = (torch.utils.data.DataLoader, torch.utils.data.Dataset, torch.utils.data.Sampler)


class _ShardInsideError(Exception):
    """An object contains a shard."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and is_shard(value):
            kind = "tensor of FSDP" if type(value) is torch.nn.Parameter else type(value).__qualname__
            raise _ShardInsideError(kind)
        return reduce_exactly(value)


_PICKLE = types.SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def reduce_exactly(value: object) -> Any:
    """Return an exact reduction of a time with a `fold`, which `torch.save` loses."""
    if isinstance(value, dt.datetime | dt.time) and type(value) in (dt.datetime, dt.time) and value.fold:
        return value.__reduce_ex__(4)
    return NotImplemented


class UnloadableObjectWarning(UserWarning):
    """An object names globals that a load refuses without `allow_globals`."""


@dataclass(frozen=True, slots=True)
class DumpedObject:
    """Serialized object in a state dict."""

    data: bytes
    digest: bytes = b""
    """`value_digest` for comparison between ranks; empty to compare `data`."""


def dump_object(value: object, *, key: str) -> bytes:
    """Serialize as a `torch.save` archive, or raise UnsupportedValueError; a `DumpedObject` is already serialized."""
    if isinstance(value, DumpedObject):
        return value.data
    if type(value) in SCALARS and sys.getsizeof(value) <= _CACHED_BYTES:
        return _dump_scalar(value, str(value))
    if type(value) not in _PLAIN:
        _refuse_without_state(value, key)
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=_PICKLE)
    except DcpError:
        raise
    except _ShardInsideError as error:
        raise UnsupportedValueError(
            f"{key!r} of type {type(value).__qualname__} contains a {error}, of which one rank's part would be saved "
            "for all: keep it in dicts, lists, tuples, deques or dataclasses that are registered by "
            "torch.utils._pytree.register_dataclass, or save the object's state_dict() in its place"
        ) from None
    except Exception as error:
        raise UnsupportedValueError(
            f"{key!r} of type {type(value).__qualname__} cannot be saved: {error}; store plain data instead "
            "(numbers, strings, containers, tensors), or keep it out of the state dict"
        ) from error
    return buffer.getvalue()


# Optimizers repeat the same few settings in each group and each save. The text tells -0.0 from 0.0.
@functools.lru_cache(maxsize=1024, typed=True)
def _dump_scalar(value: object, text: str) -> bytes:
    del text
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _refuse_without_state(value: object, key: str) -> None:
    found = next(_without_state(value), None)
    if found is None or type(found) in torch.serialization.get_safe_globals():
        return
    name = type(found).__qualname__
    remedy = (
        "its state would not be restored there: move it to the top level of the state dict, or save its state_dict()"
        if is_stateful(found)
        else "which has no state to save: save the position in the data instead, with ResumableSampler of dcp_data and "
        "its loader, or with torchdata's StatefulDataLoader in a PerRank; your script creates the data set again"
    )
    inside = "is" if found is value else "contains"
    raise UnsupportedValueError(
        f"{key!r} {inside} an object of class {name}, {remedy}. To pickle it anyway, call "
        f"torch.serialization.add_safe_globals([{name}]) before each save and load"
    )


def _without_state(value: Any) -> Iterator[object]:
    if type(value) in (list, tuple, set, frozenset, dict):
        inner = value.values() if type(value) is dict else value
        for each in itertools.islice(inner, _LOOKED_AT):
            if type(each) not in _PLAIN:
                yield from _without_state(each)
    elif isinstance(value, _DATA) or (not isinstance(value, type) and is_stateful(value)):
        yield value


def scan(data: bytes) -> list[str]:
    """Return the sorted globals that `load_object` would refuse, without importing them."""
    named: set[str] = set()
    try:
        _examine(data, allowed_globals(), named)
    except UnsafePickleError as error:
        if not named:
            raise CorruptCheckpointError(f"the object {error}") from error
    except Exception as error:
        raise CorruptCheckpointError(f"the bytes of an object are damaged: {error}") from error
    return sorted(named)


def _examine(data: bytes | memoryview, allowed: AllowList, named: set[str]) -> None:
    read_archive(
        data,
        census_table(allowed, named),
        lambda _, __, nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage(),
    )


def report_unloadable(data: bytes, *, key: str, strict: bool = False, reported: set[str] | None = None) -> None:
    """Warn once of an object that a load would refuse; UnsupportedValueError if `strict`."""
    if _is_plain(data):
        return
    refused: set[str] = set()
    reason = ""
    try:
        _examine(data, allowed_globals(), refused)
    except Exception as error:  # noqa: BLE001 - a load may raise anything
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
        raise UnsupportedValueError(message)
    if reported is None or not refused <= reported:
        warnings.warn(message, UnloadableObjectWarning, stacklevel=2)
    if reported is not None:
        reported |= refused


class _Plain(pickle.Unpickler):
    """Unpickles without globals; only for bytes from this process."""

    def find_class(self, module: str, name: str) -> Any:
        raise ForbiddenGlobalError(f"{module}.{name}")


def _is_plain(data: bytes) -> bool:
    try:
        pickled, start = ObjectArchive(data).pickled()
        stream = io.BytesIO(pickled)
        stream.seek(start)
        _Plain(stream).load()
    except Exception:  # noqa: BLE001 - otherwise it is examined
        return False
    return True


def load_object(data: bytes, *, key: str, allow_globals: Sequence[Any] = (), trust_objects: bool = False) -> Any:
    """Unpickle an object with an allow-list, its tensors on the CPU.

    With `trust_objects`, the checkpoint may run any code. UnsafeCheckpointError: a global is not allowed.
    CorruptCheckpointError: `data` is damaged.
    """
    try:
        return _load(data, allow_globals, trust_objects=trust_objects)
    except ForbiddenGlobalError as error:
        raise UnsafeCheckpointError(
            f"the object {key!r} names {error.path}, which is not allowed. {how_to_allow([error.path])}"
        ) from None
    except DcpError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(f"the stored object cannot be read: {error}", key=key) from error


def load_tensor(
    data: bytes | memoryview, *, key: str, allow_globals: Sequence[Any] = (), trust_objects: bool = False
) -> torch.Tensor:
    """Copy the tensor in a `torch.save` archive to the CPU.

    UnsafeCheckpointError: a class is not allowed. UnsupportedValueError: an allowed class failed. Exception: the
    archive is damaged.
    """
    try:
        tensor = _load(data, allow_globals, trust_objects=trust_objects)
    except ForbiddenGlobalError as error:
        paths = _without_methods(_refused(data, allowed_globals(allow_globals))) or [error.path]
        raise UnsafeCheckpointError(
            f"the tensor {key!r} is made of {', '.join(paths)}, which the allow-list lacks. {how_to_allow(paths)}"
        ) from None
    except Exception as error:
        if foreign := _without_methods(_refused(data, default_allow_list())):
            raise UnsupportedValueError(
                f"the tensor {key!r} is made of {', '.join(foreign)} and cannot be rebuilt: {error}; install the "
                "version of the library that saved it"
            ) from error
        raise
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a {type(tensor).__qualname__} is stored where a tensor should be")
    return tensor.detach()


def _refuse_global(path: str) -> Any:
    raise ForbiddenGlobalError(path)


# The allow-list is built at the first global, which numbers, strings and containers do not have.
_DEFAULT = PickleTable(_refuse_global, complete=lambda: allowed_globals().table)


def _load(data: bytes | memoryview, allow_globals: Sequence[Any], *, trust_objects: bool) -> Any:
    if trust_objects:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    try:
        return read_archive(data, allowed_globals(allow_globals).table if allow_globals else _DEFAULT)
    except ForbiddenGlobalError as error:
        if not register_library(error.path):
            raise
        return read_archive(data, allowed_globals(allow_globals).table)


def _refused(data: bytes | memoryview, allowed: AllowList) -> set[str]:
    named: set[str] = set()
    with contextlib.suppress(Exception):
        _examine(data, allowed, named)
    return named


def _without_methods(paths: set[str]) -> list[str]:
    return sorted(paths - {CLASS_METHOD} or paths)


class _Outline(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensor: torch.Tensor) -> None:
        super().__init__(file, protocol=2)
        self._tensor = tensor

    def reducer_override(self, value: Any) -> Any:
        if value is not self._tensor and isinstance(value, torch.Tensor) and is_shard(value):
            raise _ShardInsideError(f"it holds a {type(value).__qualname__}, this rank's part of a tensor")
        if isinstance(value, torch.Tensor) and hasattr(value, "wait"):  # the archive has the collective's result
            return value.wait().__reduce_ex__(2)
        return NotImplemented

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.storage.TypedStorage):
            return str(value.dtype).removeprefix("torch."), value._untyped_storage.nbytes()  # noqa: SLF001 - its own warns
        return ("", value.nbytes()) if isinstance(value, torch.UntypedStorage) else None


def _storage_of(pid: Any) -> Any:
    dtype, nbytes = pid
    untyped = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()  # its pages are never touched
    if not dtype:
        return untyped
    make: Callable[..., torch.storage.TypedStorage] = torch.storage.TypedStorage
    return make(wrap_storage=untyped, dtype=getattr(torch, dtype), _internal=True)


def check_class(key: str, tensor: torch.Tensor) -> None:
    """Raise UnsupportedValueError if a load would refuse the class or attributes."""
    outline = io.BytesIO()
    named: set[str] = set()
    reason = ""
    try:
        detached = tensor.detach()
        _Outline(outline, detached).dump(detached)
        made, _ = read_pickle(outline.getvalue(), census_table(allowed_globals(), named), persistent=_storage_of)
        if type(made) is torch.Tensor:
            reason = "it is pickled as a plain tensor"
    except Exception as error:  # noqa: BLE001 - a load may raise anything
        reason = str(error)
    if not named and not reason:
        return
    kind = type(tensor)
    what = f"{key!r} is a tensor of class {kind.__module__}.{kind.__qualname__}, which would not load back"
    if not named:
        raise UnsupportedValueError(f"{what}: {reason}; save a plain tensor with the same values instead")
    paths = _without_methods(named)
    imports, listed = as_expression(paths)
    raise UnsupportedValueError(
        f"{what}: the allow-list of loads lacks {', '.join(paths)}. If it is safe to rebuild, call "
        f"torch.serialization.add_safe_globals([{listed}]) after {imports}, here and in programs that load; or save a "
        "plain tensor with the same values"
    )


Data = bytes | memoryview
LoadStorage = Callable[["ObjectArchive", str, int], torch.UntypedStorage]


def read_archive(data: Data, table: PickleTable, load_storage: LoadStorage | None = None) -> Any:
    """Unpickle a `torch.save` archive (other bytes may follow a pure pickle) with only a table's calls.

    `load_storage`(archive, key, bytes) returns a storage; None copies to CPU memory. UnsafePickleError: something is
    not allowed. A damaged archive raises any Exception.
    """
    archive = ObjectArchive(data)
    pickled, start = archive.pickled()
    storages = _Storages(archive, load_storage or ObjectArchive.storage)
    value, _ = read_pickle(pickled, table, start=start, budget=Budget(len(data)), persistent=storages.load)
    refuse_unfolding(value, len(data))
    return value


class ObjectArchive:
    """The records of a `torch.save` archive."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._records: dict[str, ZipRecord] | None = None

    def pickled(self) -> tuple[bytes, int]:
        """Return bytes with the pickle, and its offset."""
        data = self._data
        # torch.save writes the pickle first; reading the directory would take longer than the rest.
        if isinstance(data, bytes) and data[8:10] == b"\0\0":
            lengths = local_lengths(data[: LOCAL.size])
            if lengths is not None and data[LOCAL.size : LOCAL.size + lengths[0]].endswith(b"/data.pkl"):
                return data, LOCAL.size + sum(lengths)
        return bytes(self.record("data.pkl")), 0

    def record(self, name: str) -> Data:
        """Return a record, such as `data.pkl`."""
        found = self._directory()[name]
        if found.deflated:
            return inflated(memoryview(self._data), found)
        return self._data[found.start : found.start + found.stored_bytes]

    def stored(self, key: str, nbytes: int) -> int:
        """Return an uncompressed storage's offset; ValueError if compressed, UnsafePickleError if short."""
        found = self._directory()[f"data/{key}"]
        if found.deflated:
            raise ValueError("the values of a tensor are compressed")
        if nbytes > found.bytes:
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        return found.start

    def storage(self, key: str, nbytes: int) -> torch.UntypedStorage:
        """Copy a storage's first `nbytes` to CPU memory."""
        values = self.record(f"data/{key}")
        if nbytes > len(values):
            raise UnsafePickleError("a storage that is larger than its record is not allowed")
        made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        made.numpy()[:] = np.frombuffer(values, np.uint8, nbytes)
        return made.untyped_storage()

    def swapped(self) -> bool:
        """Return whether the archive has the opposite byte order."""
        records = self._directory()
        if "byteorder" in records:
            return bytes(self.record("byteorder")) != sys.byteorder.encode()
        said = torch.serialization.get_default_load_endianness()
        return (said.name.lower() if said else "little") not in ("native", sys.byteorder)

    def _directory(self) -> dict[str, ZipRecord]:
        if self._records is None:
            try:
                records = zip_records(self._data)
                refuse_bomb(records, len(self._data))
            except CorruptCheckpointError as error:  # callers add file and key
                raise ValueError(str(error)) from error
            root = next(record.name for record in records if record.name.endswith("/data.pkl"))[: -len("data.pkl")]
            self._records = {record.name.removeprefix(root): record for record in records}
        return self._records


class _Storages:
    def __init__(self, archive: ObjectArchive, load: LoadStorage) -> None:
        self._archive = archive
        self._load = load
        self._loaded: dict[str, tuple[int, torch.UntypedStorage]] = {}

    def load(self, pid: Any) -> torch.storage.TypedStorage | torch.UntypedStorage:
        kind, storage_type, key, _, count = pid
        if kind != "storage" or type(key) is not str or type(count) is not int or not 0 <= count < 1 << 60:
            raise UnsafePickleError("a persistent id that is not a storage is not allowed")
        dtype = torch.uint8 if storage_type is torch.UntypedStorage else storage_type.dtype
        if type(dtype) is not torch.dtype:
            raise UnsafePickleError("a persistent id without a dtype is not allowed")
        nbytes = count * dtype.itemsize
        if key not in self._loaded:
            storage = (
                self._load(self._archive, key, nbytes) if nbytes else torch.empty(0, device="cpu").untyped_storage()
            )
            if nbytes and self._archive.swapped():
                storage.byteswap(dtype)  # type: ignore[no-untyped-call]
            self._loaded[key] = nbytes, storage
        known, storage = self._loaded[key]
        if nbytes != known:
            raise UnsafePickleError("a storage of two sizes is not allowed")
        if storage_type is torch.UntypedStorage:
            return storage
        make: Callable[..., torch.storage.TypedStorage] = torch.storage.TypedStorage
        return make(wrap_storage=storage, dtype=dtype, _internal=True)
