"""Conversion of a `Content` to a `torch.save` file, in one pass: first the pickle, then the bytes per tensor.

Source: torch 2.13 `torch.serialization._save` (records and their order), `torch._utils._rebuild_tensor_v2`/`_v3`.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_core.objects.object_bytes import load_object, reduce_exactly
from dcp_core.state_dict.flatten import restore_empty_mappings, unflatten_state_dict
from dcp_core.tensors.tensor_memory import tensor_bytes
from dcp_format.content.content import Content, TensorEntry, WriteOptions, ticking
from dcp_format.content.new_file import new_file
from dcp_io import Sink
from dcp_io.archives.zip_format import ZipFileWriter
from dcp_manifest.index.dtypes import ITEM_BYTES, TYPED_STORAGES

_PICKLE_PROTOCOL = 2


@dataclass(frozen=True, slots=True)
class _Tensor:
    record: str
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class _Storage:
    record: str
    kind: type
    elements: int


def write_torch_save(
    content: Content, path: str | os.PathLike[str], options: WriteOptions, *, allow_globals: Sequence[Any] = ()
) -> None:
    """Write a `torch.save` file atomically; `torch.load` opens it with `weights_only=True` and `mmap=True`.

    All objects are in memory at the same time. An error leaves an existing file unchanged.
    """
    content = ticking(content, options.tick)
    values: dict[str, Any] = {}
    for number, (name, entry) in enumerate(content.tensors.items()):
        values[name] = _Tensor(str(number), entry)
    for alias, target in content.aliases.items():
        values[alias] = values[target]
    for name, read in content.objects.items():
        values[name] = load_object(read(), key=name, allow_globals=allow_globals)
    paths = content.paths or {}
    nested = unflatten_state_dict({name: values[name] for name in _ordered(values, paths)}, paths)
    restore_empty_mappings(nested, paths)
    pickled = io.BytesIO()
    pickler = _Pickler(pickled, first_record=len(content.tensors))
    pickler.dump(nested)
    with new_file(path, overwrite=options.overwrite) as sink:
        _write(sink, pickled.getvalue(), content, pickler.storages, options.max_inflight_bytes)


def _ordered(values: dict[str, Any], paths: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in paths if name in values)
    yield from (name for name in values if name not in paths)


def _write(
    sink: Sink, pickled: bytes, content: Content, storages: dict[str, torch.UntypedStorage], max_inflight_bytes: int
) -> None:
    archive = ZipFileWriter(sink)
    small = {"data.pkl": pickled, ".format_version": b"1", ".storage_alignment": b"64", "byteorder": b"little"}
    for name, data in small.items():
        archive.add(name, len(data), [data])
    crcs = []
    for number, entry in enumerate(content.tensors.values()):
        crcs.append(archive.add(f"data/{number}", entry.data.nbytes, entry.data.pieces(max_inflight_bytes)))
    for record, storage in storages.items():
        view = tensor_bytes(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        crcs.append(archive.add(f"data/{record}", len(view), [view]))
    archive.add("version", 2, [b"3\n"])
    digits = f"{_number_of(pickled, crcs):040d}".encode()
    archive.add(".data/serialization_id", len(digits), [digits])
    archive.finish()


def _number_of(pickled: bytes, crcs: Sequence[int]) -> int:
    return int(hashlib.sha256(pickled + repr(crcs).encode()).hexdigest(), 16) % 10**40


class _Pickler(pickle.Pickler):
    """Pickles a state dict with placeholders for tensors; tensors inside objects get records of their own."""

    def __init__(self, file: io.BytesIO, *, first_record: int) -> None:
        super().__init__(file, _PICKLE_PROTOCOL)
        self._next = first_record
        self._records: dict[int, str] = {}
        self.storages: dict[str, torch.UntypedStorage] = {}
        """Name of a record → storage of a tensor inside an object."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Tensor):
            return reduce_exactly(value)
        entry = value.entry
        shape, dtype = entry.shape, getattr(torch, entry.dtype)
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        stride = tuple(reversed(strides))
        count = math.prod(shape)
        typed = TYPED_STORAGES.get(entry.dtype)
        if typed is not None:
            storage = _Storage(value.record, getattr(torch, typed), count)
            return torch._utils._rebuild_tensor_v2, (storage, 0, shape, stride, False, OrderedDict())  # noqa: SLF001
        storage = _Storage(value.record, torch.storage.UntypedStorage, count * ITEM_BYTES[entry.dtype])
        arguments: tuple[Any, ...] = (storage, 0, shape, stride, False, OrderedDict(), dtype)
        return torch._utils._rebuild_tensor_v3, arguments  # noqa: SLF001

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return "storage", value.kind, value.record, "cpu", value.elements
        if isinstance(value, torch.storage.TypedStorage):
            untyped = value._untyped_storage  # noqa: SLF001
            kind = getattr(torch, TYPED_STORAGES[str(value.dtype).removeprefix("torch.")])
            return "storage", kind, self._beside(untyped), "cpu", value._size()  # type: ignore[no-untyped-call]  # noqa: SLF001
        if isinstance(value, torch.UntypedStorage):
            return "storage", torch.storage.UntypedStorage, self._beside(value), "cpu", value.nbytes()
        return None

    def _beside(self, storage: torch.UntypedStorage) -> str:
        known = self._records.get(storage._cdata)  # noqa: SLF001
        if known is None:
            known = self._records[storage._cdata] = str(self._next)  # noqa: SLF001
            self.storages[known] = storage
            self._next += 1
        return known
