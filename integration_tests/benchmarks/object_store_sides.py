"""Who saves to and loads from an object store in the benchmark, each with as many requests at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

__all__ = ["ALONE", "CONNECTOR", "OURS", "STOCK", "Side", "clear", "sides"]

ALONE, OURS, STOCK, CONNECTOR = "obstore alone", "ours, obstore", "stock, fsspec", "s3torchconnector"
Side = tuple[Callable[[str], object], Callable[[str], object]]
"""Saves the state to a URI; loads it from there into the template."""
State = Mapping[str, torch.Tensor]

MIB = 1 << 20
THREADS, UPLOADS, READERS, REQUEST_BYTES = 4, 4, 16, 8 * MIB


class _Alone:
    """The same bytes by the client alone: as many objects, parts and requests at a time; no checksums and no index."""

    def __init__(self, state: State, template: State) -> None:
        self._given = [_bytes(state[name]) for name in sorted(state)]
        self._taken = [_bytes(template[name]) for name in sorted(template)]

    def put(self, uri: str) -> None:
        """Write the objects."""
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(partial(self._put_one, _native(uri)), range(THREADS)))

    def _put_one(self, store: Any, number: int) -> None:
        import obstore

        writer = obstore.open_writer(store, str(number), buffer_size=REQUEST_BYTES, max_concurrency=UPLOADS)
        for view in self._given[number::THREADS]:
            for start in range(0, len(view), MIB):
                writer.write(bytes(view[start : start + MIB]))
        writer.close()

    def get(self, uri: str) -> None:
        """Read them."""
        places = []
        for number in range(THREADS):
            offset = 0
            for view in self._taken[number::THREADS]:
                parts = range(0, len(view), REQUEST_BYTES)
                places += [(number, offset + start, view[start : start + REQUEST_BYTES]) for start in parts]
                offset += len(view)
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(partial(self._get_one, _native(uri)), places))

    def _get_one(self, store: Any, place: tuple[int, int, memoryview]) -> None:
        import obstore

        number, start, into = place
        into[:] = memoryview(obstore.get_range(store, str(number), start=start, length=len(into)))


def _native(uri: str) -> Any:
    from obstore.store import from_url

    return from_url(uri, client_options={"allow_http": True})


def clear(uri: str) -> None:
    """Remove what a side has saved: the server holds everything in memory."""
    import obstore

    store = _native(uri)
    for page in obstore.list(store):
        obstore.delete(store, [meta["path"] for meta in page])


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _ours(state: State, template: dict[str, Any]) -> dict[str, Side]:
    import dcp_all as dcp

    return {
        OURS: (
            lambda uri: dcp.save({**state}, storage_writer=dcp.ObjectStoreWriter(uri)),
            lambda uri: dcp.load(template, storage_reader=dcp.ObjectStoreReader(uri)),
        ),
        "ours, fsspec": (
            lambda uri: dcp.save({**state}, storage_writer=dcp.FsspecWriter(uri, thread_count=2)),
            lambda uri: dcp.load(template, storage_reader=dcp.FsspecReader(uri)),
        ),
    }


def _stock(state: State, template: dict[str, Any]) -> Side:
    from torch.distributed.checkpoint import _fsspec_filesystem, state_dict_loader, state_dict_saver

    return (
        lambda uri: state_dict_saver.save({**state}, storage_writer=_fsspec_filesystem.FsspecWriter(uri)),
        lambda uri: state_dict_loader.load(template, storage_reader=_fsspec_filesystem.FsspecReader(uri)),
    )


def _connector(state: State, template: dict[str, Any]) -> Side:
    """Amazon's connector: stock's writer and reader over its own client, which has an endpoint only by hand."""
    import importlib

    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    connector: Any = importlib.import_module("s3torchconnector")
    storages: Any = importlib.import_module("s3torchconnector.dcp")
    clients: Any = importlib.import_module("s3torchconnector._s3client")
    region, config = os.environ["AWS_REGION"], connector.S3ClientConfig(force_path_style=True)
    client = clients.S3Client(region, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def through(storage: Any) -> Any:
        storage.fs._client = client
        return storage

    return (
        lambda uri: state_dict_saver.save(
            {**state},
            storage_writer=through(storages.S3StorageWriter(region, uri, s3client_config=config, thread_count=THREADS)),
        ),
        lambda uri: state_dict_loader.load(
            template, storage_reader=through(storages.S3StorageReader(region, uri, s3client_config=config))
        ),
    )


def sides(state: State, template: dict[str, Any], *, without: Sequence[str] = ()) -> dict[str, Side]:
    """Name → how it saves `state` and loads into `template`, in the environment of a server."""
    alone = _Alone(state, template)
    found: dict[str, Side] = {ALONE: (alone.put, alone.get), **_ours(state, template), STOCK: _stock(state, template)}
    if CONNECTOR not in without:
        found[CONNECTOR] = _connector(state, template)
    return found
