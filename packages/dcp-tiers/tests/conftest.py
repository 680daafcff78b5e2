"""Checkpoints of a few bytes, saved and read without torch; tiers in folders of the test; pretended hosts."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from dcp_base import installed
from dcp_io import KeepAll, KeepPolicy, LocalStore, Payload, ReadRequest, Store, StoreBackend, WriteRequest, open_store
from dcp_io.roots.catalogue import Catalogue
from dcp_io.stores import host_store
from dcp_manifest import CheckpointIndex
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, ManifestInfo
from dcp_manifest.index.stored_items import StoredItems
from dcp_tiers import Tier, Tiers
from dcp_tiers.promotion import Promotion
from dcp_tiers.waiting import steps_to_send
from integration_tests.kits.shelves import ShelfPlugin

_clock = itertools.count(time.time_ns())


def save(root: str | Path, step: int, values: Mapping[str, bytes] | None = None, **metrics: float) -> str:
    """Save a step as the manager does, one file for each value; returns the save id."""
    values = values or contents(step)
    catalogue = Catalogue(open_store(root), stale_after_seconds=3600)
    catalogue.prepare(step, metrics)
    store = catalogue.store_of(step)
    backends = [StoreBackend(store) for _ in values]
    save_id = backends[0].begin_save(overwrite=True)
    items = []
    for rank, (backend, (key, data)) in enumerate(zip(backends, values.items(), strict=True)):
        if rank:
            backend.join_save(save_id)
        payload = Payload(memoryview(data), Framing.RAW, "uint8", (len(data),))
        request = WriteRequest(key, len(data), lambda payload=payload: payload)
        items += backend.write([request], prefix=f"__{rank}_", save_id=save_id)
    info = ManifestInfo(
        save_id, len(values), "test", generation=backends[0].session.generation, created_ns=next(_clock)
    )
    index = _index(values, items, info)
    backends[0].publish(".metadata", encode(index))
    for backend in backends:
        backend.finish_save(index.files)
    catalogue.published(step)
    return save_id


def _index(values: Mapping[str, bytes], items: list, info: ManifestInfo) -> CheckpointIndex:
    stored = StoredItems.of(items)
    sizes = np.array([len(data) for data in values.values()], np.int64)
    count = len(values)
    return CheckpointIndex(
        dtypes=("uint8",),
        files=stored.files,
        chains=stored.chains,
        tensor_names=list(values),
        tensor_dtype=np.zeros(count, np.uint8),
        tensor_flags=np.zeros(count, np.uint8),
        tensor_ndim=np.ones(count, np.uint8),
        tensor_owner=np.zeros(count, np.uint32),
        tensor_shape=sizes,
        tensor_chunks=np.ones(count, np.int64),
        chunk_offsets=np.zeros(count, np.int64),
        chunk_sizes=sizes,
        chunk_items=stored.columns,
        object_names=[],
        object_owner=np.zeros(0, np.uint32),
        object_items=stored.take(np.zeros(0, np.int64)).columns,
        info=info,
    )


def contents(step: int) -> dict[str, bytes]:
    """The values of a step's checkpoint."""
    return {f"value{n}": bytes([step % 256, n]) * (40_000 + n) for n in range(3)}


def load(store: Store) -> dict[str, bytes]:
    """Read all values of the checkpoint in a folder, and check their CRCs."""
    backend = StoreBackend(store)
    index = backend.read_index()
    values: dict[str, bytes] = {}
    requests = []
    for row, name in enumerate(index.tensor_names):
        item = index.stored_item(index.chunk_items, row)
        requests.append(
            ReadRequest(
                name, item, 0, item.stored_bytes, None, lambda data, name=name: values.update({name: bytes(data)})
            )
        )
    backend.read(requests)
    return values


FOLDER, SHELF = "/near/run", "shelf://run"


@contextlib.contextmanager
def on_host(disks: Path, host: str) -> Iterator[Path]:
    """Pretend to be on a host, whose folder and shelf of the run are the same files."""
    folder = mock.patch.object(host_store, "host_folder", lambda path: f"{disks}/{host}{path}")
    with folder, mock.patch.dict(os.environ, DCP_SHELF_DIR=f"{disks}/{host}/near"):
        yield Path(f"{disks}/{host}{FOLDER}")


def save_apart(disks: Path, step: int) -> None:
    """Save a step of three values, each on a host of its own; all have the index."""
    whole = disks / "whole"
    save(whole, step)
    data = sorted(file.name for file in (whole / f"step-{step}").glob("*.distcp"))
    assert len(data) == 3
    for name, host in zip(data, "abc", strict=True):
        with on_host(disks, host) as near:
            shutil.copytree(whole / f"step-{step}", near / f"step-{step}", ignore=lambda _, names: {*data} & {*names})
            shutil.copy(whole / f"step-{step}" / name, near / f"step-{step}")


def bring(disks: Path, far: Path, *hosts: str, near: str = FOLDER) -> dict[str, list[int]]:
    """Bring the parts of hosts, one after the other; returns which tier lacks which steps then."""
    left: dict[str, list[int]] = {}
    for host in hosts:
        with on_host(disks, host):
            tiers = Tiers([Tier(near, per_host=True), Tier(far)])
            arrived = Promotion(tiers, 1).run(lambda _: False)
            left = {} if arrived else {str(far): sorted(steps_to_send(tiers, 1, 0))}
    return left


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


@pytest.fixture
def helpers(near: Path, far: Path) -> SimpleNamespace:
    def tiers(keep: KeepPolicy | None = None, **options: float) -> Tiers:
        return Tiers([Tier(near), Tier(far, keep or KeepAll(), **options)])

    def loaded(root: Path) -> dict[int, dict[str, bytes]]:
        catalogue = Catalogue(LocalStore(root), stale_after_seconds=3600)
        return {folder.step: load(folder.store) for folder in catalogue.folders() if folder.is_good}

    return SimpleNamespace(save=save, contents=contents, load=load, loaded=loaded, tiers=tiers)


@pytest.fixture(params=[FOLDER, SHELF], ids=["folder", "shelf"])
def hosts(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """Pretended hosts, with a folder each, and with another store of each host."""
    near = request.param
    url = near if "://" in near else f"host://{near}"
    installed.register(ShelfPlugin(), name="shelves")
    yield SimpleNamespace(
        near=near, url=url, folder=FOLDER, on_host=on_host, save_apart=save_apart, bring=partial(bring, near=near)
    )
    installed.unregister("shelves")


@pytest.fixture
def events():
    """Events that this process emits during the test."""
    seen: list = []
    installed.divert_events(seen.append)
    yield seen
    installed.divert_events(None)
