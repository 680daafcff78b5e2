"""Saves and loads over an S3 server on loopback: ours by obstore and by fsspec, stock by fsspec, and obstore alone.

`python -m integration_tests.benchmarks.object_store [MiB] [rounds] [--json FILE]` prints medians and ratios. Bars: our
throughput ÷ that of obstore alone ≥ 0.8, ÷ stock's ≥ 2, bytes read ÷ needed ≤ 1.1, memory within the budget. The server
is moto's, in Python: it is the slowest part by far, so that ratios near 1 say that nothing of ours is in its way, not
how fast a fast service would be used.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from dcp_io.testing.fault_proxy import FaultProxy
from dcp_io.testing.s3_server import S3Server

__all__ = ["compare", "main"]

MIB = 1 << 20
TENSORS = 16
THREADS, UPLOADS, READERS, REQUEST_BYTES = 4, 4, 16, 8 * MIB
Side = tuple[Callable[[str], object], Callable[[str], object]]


def _state(mib: int) -> dict[str, torch.Tensor]:
    """Equal tensors with values that do not compress."""
    generator = torch.Generator().manual_seed(3)
    count = mib * MIB // TENSORS // 4
    return {f"layers.{n}.weight": torch.randn(count, generator=generator) for n in range(TENSORS)}


class _Alone:
    """The same bytes by the client alone: as many objects, parts and requests at a time; no checksums and no index."""

    def __init__(self, state: dict[str, torch.Tensor], template: dict[str, torch.Tensor]) -> None:
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


def _bytes(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array).cast("B")


def _sides(state: dict[str, torch.Tensor], template: dict[str, torch.Tensor]) -> dict[str, Side]:
    from torch.distributed.checkpoint import _fsspec_filesystem as stock_fsspec
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    import dcp_all as dcp

    alone = _Alone(state, template)
    return {
        "obstore alone": (alone.put, alone.get),
        "ours, obstore": (
            lambda uri: dcp.save(state, storage_writer=dcp.ObjectStoreWriter(uri)),
            lambda uri: dcp.load(template, storage_reader=dcp.ObjectStoreReader(uri)),
        ),
        "ours, fsspec": (
            lambda uri: dcp.save(state, storage_writer=dcp.FsspecWriter(uri, thread_count=2)),
            lambda uri: dcp.load(template, storage_reader=dcp.FsspecReader(uri)),
        ),
        "stock, fsspec": (
            lambda uri: state_dict_saver.save(state, storage_writer=stock_fsspec.FsspecWriter(uri)),
            lambda uri: state_dict_loader.load(template, storage_reader=stock_fsspec.FsspecReader(uri)),
        ),
    }


def compare(mib: int, rounds: int) -> dict[str, Any]:
    """Seconds of each side's save and load, taken in turn, and what is asked of them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    state = _state(mib)
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    taken: dict[str, dict[str, list[float]]] = {}
    with S3Server() as server, server.in_environment():
        sides = _sides(state, template)
        for turn in range(rounds + 1):
            for name, (save, load) in sides.items():
                uri = f"s3://{server.bucket}/{turn}/{name.replace(', ', '-').replace(' ', '-')}"
                seconds = [_seconds(save, uri), _seconds(load, uri)]
                if name != "obstore alone" or turn == 0:
                    assert all(torch.equal(template[key], value) for key, value in state.items()), name
                for value in template.values():
                    value.zero_()
                if turn:  # the first warms up
                    for operation, spent in zip(("save", "load"), seconds, strict=True):
                        taken.setdefault(name, {}).setdefault(operation, []).append(spent)
        figures: dict[str, Any] = {"MiB": mib, "rounds": rounds, "seconds": taken}
        figures["read / needed"] = _read(server, mib)
    for operation in ("save", "load"):
        for rival in ("obstore alone", "stock, fsspec"):
            pairs = zip(taken[rival][operation], taken["ours, obstore"][operation], strict=True)
            figures[f"{operation}: our throughput / {rival}"] = statistics.median(b / a for b, a in pairs)
    figures |= _memory(mib)
    return figures


def _seconds(function: Callable[[str], object], uri: str) -> float:
    start = time.perf_counter()
    function(uri)
    return time.perf_counter() - start


def _read(server: S3Server, mib: int) -> float:
    """Bytes that the server gives for one quarter of each tensor ÷ bytes of that quarter."""
    import dcp_all as dcp

    state = _state(mib)
    uri = f"s3://{server.bucket}/read"
    dcp.save(state, storage_writer=dcp.ObjectStoreWriter(uri))
    part = {name: torch.zeros(len(value) // 4) for name, value in state.items()}
    with FaultProxy(server.url) as proxy:
        reader = dcp.ObjectStoreReader(uri, storage_options={"endpoint": proxy.url})
        dcp.load(part, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_resize=True))
        return proxy.bytes_given / sum(value.nbytes for value in part.values())


def _memory(mib: int) -> dict[str, float]:
    """MiB that a save and a load take above the state, each in a process of its own."""
    with S3Server() as server:
        environment = {**os.environ, **server.environment(), "OMP_NUM_THREADS": "1"}
        found = {}
        for operation in ("save", "load"):
            command = [sys.executable, "-m", "integration_tests.benchmarks.object_store", str(mib), "--peak", operation]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[f"{operation}: MiB above the state"] = float(ran.stdout)
        return found


def _peak(mib: int, operation: str) -> float:
    import dcp_all as dcp

    uri = "s3://bucket/memory"
    state = _state(mib)
    small = {"warm": torch.ones(10)}
    dcp.save(small, storage_writer=dcp.ObjectStoreWriter("s3://bucket/warm"))
    dcp.load(small, storage_reader=dcp.ObjectStoreReader("s3://bucket/warm"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if operation == "save":
        dcp.save(state, storage_writer=dcp.ObjectStoreWriter(uri))
    else:
        dcp.load(state, storage_reader=dcp.ObjectStoreReader(uri))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mib", nargs="?", type=int, default=512)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--peak", choices=("save", "load"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        print(_peak(given.mib, given.peak))
        return
    figures = compare(given.mib, given.rounds)
    for name, value in figures.items():
        if name == "seconds":
            for side, operations in value.items():
                told = {each: round(given.mib / statistics.median(spent), 1) for each, spent in operations.items()}
                print(f"{side:16} MiB/s {told}")
        else:
            print(f"{name:50} {value}")
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
