from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest

from dcp_io import LocalStore, StoreBackend
from dcp_io.reading.read_engine import read_items
from dcp_io.requests import Payload, ReadRequest, WriteRequest
from dcp_io.writing import write_engine
from dcp_io.writing.write_engine import write_items
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import CheckpointIndex, Framing, ManifestInfo, StoredItem
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.index.stored_items import StoredItems
from integration_tests.kits.damage import flip

RNG = np.random.default_rng(1)
WRITTEN_BYTES = [0, 1, 63, 70_000, 300_000, 1_500_000]


@pytest.fixture
def store(tmp_path):
    store = LocalStore(tmp_path / "checkpoint")
    store.make()
    return store


def raw_request(key: str, data: bytes, dtype: str = "uint8", sizes: tuple[int, ...] | None = None) -> WriteRequest:
    """A request for the bytes of one tensor, one-dimensional unless `sizes` says otherwise."""
    sizes = (len(data) // ITEM_BYTES[dtype],) if sizes is None else sizes
    payload = Payload(memoryview(data), Framing.RAW, dtype, sizes)
    return WriteRequest(key, len(data), lambda: payload)


def object_request(key: str, data: bytes, framing: Framing = Framing.OBJECT) -> WriteRequest:
    return WriteRequest(key, len(data), lambda: Payload(data, framing))


def make_index(
    tensors: Mapping[str, tuple[str, tuple[int, ...], StoredItem]],
    objects: Mapping[str, StoredItem] | None = None,
    info: ManifestInfo | None = None,
) -> CheckpointIndex:
    """An index of whole tensors (dtype, sizes, item) and objects."""
    objects = objects or {}
    chunk_items = [item for _, _, item in tensors.values()]
    stored = StoredItems.of([*chunk_items, *objects.values()])
    dtypes = tuple(sorted({dtype for dtype, _, _ in tensors.values()}))
    numbers = [n for _, sizes, _ in tensors.values() for n in sizes]
    return CheckpointIndex(
        dtypes=dtypes,
        files=stored.files,
        chains=stored.chains,
        tensor_names=list(tensors),
        tensor_dtype=np.array([dtypes.index(dtype) for dtype, _, _ in tensors.values()], np.uint8),
        tensor_flags=np.zeros(len(tensors), np.uint8),
        tensor_ndim=np.array([len(sizes) for _, sizes, _ in tensors.values()], np.uint8),
        tensor_owner=np.zeros(len(tensors), np.uint32),
        tensor_shape=np.array(numbers, np.int64),
        tensor_chunks=np.ones(len(tensors), np.int64),
        chunk_offsets=np.zeros(len(numbers), np.int64),
        chunk_sizes=np.array(numbers, np.int64),
        chunk_items=stored.take(np.arange(len(chunk_items))).columns,
        object_names=list(objects),
        object_owner=np.zeros(len(objects), np.uint32),
        object_items=stored.take(np.arange(len(chunk_items), len(stored))).columns,
        info=info or ManifestInfo(save_id="0" * 16, world_size=1, writer="test"),
    )


def save_all(
    store: LocalStore,
    values: list[Mapping[str, bytes]],
    *,
    rank_local_id: str | None = None,
    **options: object,
) -> str:
    """One whole save of several ranks, one after another in this process; `values[rank]` maps keys to bytes."""
    backends = [StoreBackend(store, **options) for _ in values]
    if rank_local_id is None:
        save_id = backends[0].begin_save(overwrite=True)
        for backend in backends[1:]:
            backend.join_save(save_id)
    else:
        save_id = rank_local_id
        for rank, backend in enumerate(backends):
            backend.begin_rank_local_save(save_id, rank, overwrite=True)
    tensors = {}
    for rank, (backend, mine) in enumerate(zip(backends, values, strict=True)):
        requests = [raw_request(key, data) for key, data in mine.items()]
        items = backend.write(requests, prefix=f"__{rank}_", save_id=save_id)
        found = {key: ("uint8", (len(mine[key]),), item) for key, item in zip(mine, items, strict=True)}
        tensors.update(found)
        if rank_local_id is not None:
            info = ManifestInfo(save_id, len(values), "test", generation=backend.session.generation, rank=rank)
            index = make_index(found, info=info)
            backend.publish(f"__{rank}.{save_id}.metadata", encode(index))
            backend.publish(f"__{rank}.metadata", encode(index))
            backend.finish_save(index.files)
    if rank_local_id is None:
        info = ManifestInfo(save_id, len(values), "test", generation=backends[0].session.generation)
        index = make_index(tensors, info=info)
        backends[0].publish(".metadata", encode(index))
        for backend in backends:
            backend.finish_save(index.files)
    return save_id


def merged(values: list[Mapping[str, bytes]]) -> dict[str, bytes]:
    """Contents of a checkpoint after `save_all` of these values."""
    return {key: data for mine in values for key, data in mine.items()}


def load_all(store: LocalStore, **options: object) -> dict[str, bytes]:
    """Every tensor of the current checkpoint, verified."""
    backend = StoreBackend(store, **options)
    index = backend.read_index()
    values: dict[str, bytes] = {}
    requests = []
    for row, name in enumerate(index.tensor_names):
        item = index.stored_item(index.chunk_items, row)

        def done(data: memoryview, name: str = name) -> None:
            values[name] = bytes(data)

        requests.append(ReadRequest(name, item, 0, item.stored_bytes, None, done))
    backend.read(requests)
    return values


class Target:
    """A request for part of an item, and the bytes that were delivered."""

    def __init__(self, key, item, start, stop, *, direct):
        self.memory = bytearray(stop - start) if direct else None
        self.seen = []
        into = memoryview(self.memory) if direct else None
        self.request = ReadRequest(key, item, start, stop, into, lambda data: self.seen.append(bytes(data)))

    def check(self, expected):
        assert self.seen == [expected]
        if self.memory is not None:
            assert self.memory == expected


@pytest.fixture
def helpers():
    return SimpleNamespace(
        raw_request=raw_request,
        object_request=object_request,
        make_index=make_index,
        save_all=save_all,
        load_all=load_all,
        merged=merged,
        read_back=read_back,
        target=Target,
        flip=lambda store, name, offset, bit=0: flip(os.path.join(store.path, name), offset, 1 << bit),
        names=lambda store: sorted(entry.name for entry in store.list()),
    )


@pytest.fixture
def written(store, monkeypatch):
    """Values by key, and their items in two files of the torch layout."""
    monkeypatch.setattr(write_engine, "FILE_MIN_BYTES", 1)
    data = {f"t{n}": RNG.bytes(size) for n, size in enumerate(WRITTEN_BYTES)}
    requests = [raw_request(key, value) for key, value in data.items()]
    items = write_items(store, requests, prefix="__0_", save_id="abc", threads=2, sync=False)
    return data, dict(zip(data, items, strict=True))


def read_back(store: LocalStore, items: Mapping[str, StoredItem], **options: object) -> dict[str, bytes]:
    """The stored bytes of items, verified."""
    values: dict[str, bytes] = {}
    requests = [
        ReadRequest(key, item, 0, item.stored_bytes, None, lambda data, key=key: values.update({key: bytes(data)}))
        for key, item in items.items()
    ]
    read_items(store, requests, **options)
    return values


class PatchedOs:
    """Stands in for the module `os` in the package under test: chosen functions are replaced, all others are real."""

    def __init__(self, **replaced: Callable[..., object]) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


@pytest.fixture
def patch_os(monkeypatch):
    """Replace functions of `os` in the modules that access files."""

    def patch(**replaced: Callable[..., object]) -> None:
        patched = PatchedOs(**replaced)
        for module in ("dcp_io.stores.local_store", "dcp_base.descriptors"):
            monkeypatch.setattr(f"{module}.os", patched)

    return patch
