"""Hosts in one process, each a thread with a folder of its own, and small checkpoints whose parts they have."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from dcp_io import LocalStore, Payload, StoreBackend, WriteRequest
from dcp_io.roots.copy_notes import CopyRequest, HostsCopied
from dcp_io.stores.host_store import HostFolder
from dcp_manifest import CheckpointIndex
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import Framing, ManifestInfo
from dcp_manifest.index.stored_items import StoredItems
from dcp_memory import partner
from dcp_memory.partners import copying
from dcp_ranks.phases.store_coordinator import StoreCoordinator

FILES_OF_A_HOST = 2


def save(folder: Path, values: dict[str, bytes]) -> str:
    """Save a checkpoint with a file for each value; returns the save id."""
    backends = [StoreBackend(LocalStore(folder)) for _ in values]
    save_id = backends[0].begin_save(overwrite=True)
    items = []
    for rank, (backend, (key, data)) in enumerate(zip(backends, values.items(), strict=True)):
        if rank:
            backend.join_save(save_id)
        payload = Payload(memoryview(data), Framing.RAW, "uint8", (len(data),))
        request = WriteRequest(key, len(data), lambda payload=payload: payload)
        items += backend.write([request], prefix=f"__{rank}_", save_id=save_id)
    stored = StoredItems.of(items)
    sizes, count = np.array([len(data) for data in values.values()], np.int64), len(values)
    index = CheckpointIndex(
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
        info=ManifestInfo(save_id, count, "test", created_ns=time.time_ns()),
    )
    backends[0].publish(".metadata", encode(index))
    for backend in backends:
        backend.finish_save(index.files)
    return save_id


class Hosts:
    """Hosts of a job, each with the folder `<number>/run`."""

    def __init__(self, place: Path, count: int) -> None:
        self.place, self.count = place, count
        self.cancelled = False
        self.rate: float | None = None

    def folder(self, host: int, step: int = 1) -> Path:
        return self.place / str(host) / "run" / f"step-{step}"

    def store(self, host: int, step: int = 1) -> HostFolder:
        return HostFolder(self.folder(host, step))

    def save(self, step: int = 1, size: int = 100_000) -> list[list[str]]:
        """Save a step; returns the names of the files that each host has written."""
        whole = self.place / "whole"
        values = {f"v{n}": bytes([step, n]) * (size // 2 + n) for n in range(FILES_OF_A_HOST * self.count)}
        save(whole, values)
        names = sorted(path.name for path in whole.glob("*.distcp"))
        parts = [names[FILES_OF_A_HOST * host :][:FILES_OF_A_HOST] for host in range(self.count)]
        for host, part in enumerate(parts):
            folder = self.folder(host, step)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name in (".metadata", *part):
                shutil.copy(whole / name, folder)
        shutil.rmtree(whole)
        return parts

    def run(self, function: Callable[[int, StoreCoordinator], Any], *, seconds: float = 60.0) -> list[Any]:
        """Run a function (host, coordinator) on each host, in a thread."""
        store = dist.HashStore()

        def one(host: int) -> Any:
            with StoreCoordinator(store, host, self.count, sequence=1, timeout_seconds=seconds) as them:
                return function(host, them)

        with ThreadPoolExecutor(self.count) as pool:
            return [future.result() for future in [pool.submit(one, host) for host in range(self.count)]]

    def copy(self, step: int = 1) -> list[HostsCopied]:
        """Copy a step to partners."""
        copies = partner(self.rate)

        def one(host: int, them: StoreCoordinator) -> HostsCopied:
            request = CopyRequest(self.store(host, step), range(self.count), lambda: self.cancelled)
            return copies.copy(them, request)

        return self.run(one)


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[[int], Hosts]]:
    """Function that makes hosts, which count as machines of their own."""
    with mock.patch.object(copying, "group_by_host", lambda proved: tuple((rank,) for rank in sorted(proved))):
        yield lambda count: Hosts(tmp_path, count)
