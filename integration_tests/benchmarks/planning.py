"""What planning a save costs on many ranks: `python -m integration_tests.benchmarks.planning --help`.

One process plays all ranks in turn: each makes its plan and sends it as bytes, the coordinator decodes them, plans and
encodes its answers, and each rank takes its answer and saves once more. What is not simulated is the network between
them (see `coordination`). Each size runs in a process of its own, so that peak memory is that of the size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

from dcp_core.planning.plan_exchange import RANK_PLANS, PackedResults, PlanExchange, pack
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.metadata import Metadata, StorageMeta
from dcp_core.records.protocols import SavePlan
from dcp_core.tables.metadata_columns import records_of, written_index
from dcp_core.tables.plan_columns import PlanColumns
from dcp_manifest import CheckpointIndex, read_index
from dcp_manifest.file.manifest_write import encode as encode_index
from dcp_manifest.index.columns import Framing, starts
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks import Coordinator
from dcp_ranks.transport.store_wire import decode, encode
from integration_tests.benchmarks.manifest import INFO, items

RANKS = (64, 256, 1024, 4096, 16384)
TENSORS = 3_000
ROWS, COLUMNS, TENSOR_PARALLEL = 64, 1024, 8


@cache
def layout(world: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names, global shapes (0 for a missing dimension), and of each tensor how it is cut: 0 not, 1 rows, 2 both ways.

    Of ten tensors six are cut by rows over all ranks, three also by columns over 8, and one is replicated.
    """
    names = [f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(TENSORS)]
    kind = np.array([1, 1, 1, 1, 1, 1, 2, 2, 2, 0] * (TENSORS // 10))
    shapes = np.zeros((TENSORS, 2), np.int64)
    shapes[kind == 1] = (ROWS * world, COLUMNS)
    shapes[kind == 2] = (ROWS * world // TENSOR_PARALLEL, COLUMNS * TENSOR_PARALLEL)
    shapes[kind == 0] = (4096, 0)
    return names, shapes, kind


def held(rank: int, world: int) -> SavePlan:
    """What one rank holds, as the default planner says it."""
    names, shapes, kind = layout(world)
    ndim = np.where(kind == 0, 1, 2).astype(np.uint8)
    offsets, sizes = np.zeros_like(shapes), shapes.copy()
    offsets[kind == 1, 0] = rank * ROWS
    offsets[kind == 2] = (rank // TENSOR_PARALLEL * ROWS, rank % TENSOR_PARALLEL * COLUMNS)
    sizes[kind > 0] = (ROWS, COLUMNS)
    used = np.arange(2) < ndim[:, None]
    index = CheckpointIndex(
        dtypes=("bfloat16",),
        tensor_names=names,
        tensor_dtype=np.zeros(TENSORS, np.uint8),
        tensor_flags=np.zeros(TENSORS, np.uint8),
        tensor_ndim=ndim,
        tensor_owner=np.zeros(TENSORS, np.uint32),
        tensor_shape=shapes[used],
        tensor_chunks=np.ones(TENSORS, np.int64),
        chunk_offsets=offsets[used],
        chunk_sizes=sizes[used],
        object_names=["step"],
        object_owner=np.zeros(1, np.uint32),
    )
    columns = PlanColumns(index, (kind == 0).astype(np.uint8), np.array([64], np.int64))
    return SavePlan(
        columns.items(),
        planner_data={name: ("model", name[6:]) for name in names} | {"step": ("step",)},
        digests={names[row]: row for row in np.flatnonzero(kind == 0).tolist()} | {"step": 7},
        splittable=True,
    )


class Played(Coordinator):
    """The coordinator as a rank of the simulation sees it."""

    def __init__(self, rank: int, world: int, exchange: Callable[[Any, Callable[[list[Any]], Sequence[Any]]], Any]):
        super().__init__(rank, world, 0)
        self._exchange = exchange

    def reduce_scatter(self, phase: str, map_fn: Any, reduce_fn: Any) -> Any:
        """Hand both sides of the phase to the simulation."""
        del phase
        return self._exchange(map_fn(), reduce_fn)

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    all_reduce = all_gather = broadcast = barrier = save_nonce = _unused  # type: ignore[assignment]

    def close(self) -> None:
        """Nothing is open."""


def plan_globally(plans: list[SavePlan], known: Metadata | None) -> tuple[list[SavePlan], Metadata]:
    """The plans, each with a placement, and the metadata."""
    if known is None:
        plans, known = DefaultSavePlanner().create_global_plan(plans)
    placements = [StorageMeta(f"__{rank}_", INFO.save_id) for rank in range(len(plans))]
    return [SavePlan(each.items, storage_data=one) for each, one in zip(plans, placements, strict=True)], known


def ask(rank: int, world: int, answers: Sequence[bytes]) -> bytes:
    """What a rank sends after these answers; if the last of them has its plan, it saves once more."""
    said: list[bytes] = []

    class Stop(Exception):  # noqa: N818
        pass

    def exchange(message: Any, _: Any) -> Any:
        said.append(encode(message))
        if len(said) > len(answers):
            raise Stop
        return decode(answers[len(said) - 1])

    while len(said) <= len(answers):
        with suppress(Stop):
            PlanExchange(Played(rank, world, exchange), DefaultSavePlanner(), "simulated").run(
                lambda: held(rank, world), plan_globally
            )
    return said[len(answers)]


def coordinate(world: int) -> tuple[dict[str, float], list[list[bytes]], Metadata, PlanExchange]:
    """The planning phases on the coordinator: seconds, bytes of each kind, the answers, the metadata, its exchange."""
    times = dict.fromkeys(("decode_seconds", "plan_seconds", "encode_seconds"), 0.0)
    made: list[Metadata] = []
    answers: list[list[bytes]] = [[] for _ in range(world)]
    sent = [0] * world

    def exchange(own: Any, reduce_fn: Any) -> Any:
        nothing = encode(None)
        messages = []
        for rank in range(1, world):
            waits = bool(answers[rank]) and decode(answers[rank][-1]).wanted == "nothing"
            messages.append(nothing if waits else ask(rank, world, answers[rank]))
            sent[rank] += len(messages[-1])
        start = time.process_time()
        values = [own, *map(decode, messages)]
        del messages
        decoded = time.process_time()
        replies = reduce_fn(values)
        planned = time.process_time()
        for rank, reply in enumerate(replies[1:], 1):
            answers[rank].append(encode(reply))
        times["decode_seconds"] += decoded - start
        times["plan_seconds"] += planned - decoded
        times["encode_seconds"] += time.process_time() - planned
        return replies[0]

    def plan(plans: list[SavePlan], known: Metadata | None) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = plan_globally(plans, known)
        made.append(metadata)
        return plans, metadata

    own = PlanExchange(Played(0, world, exchange), DefaultSavePlanner(), "simulated")
    own.run(lambda: held(0, world), plan)
    times["seconds"] = sum(times.values())
    times["up_bytes"] = sorted(sent)[world // 2]
    times["down_bytes"] = max(sum(map(len, each)) for each in answers)
    times["coordinator_gets_bytes"] = sum(sent)
    return times, answers, made[0], own


def results_of(exchange: PlanExchange, index: CheckpointIndex) -> list[PackedResults]:
    """What the ranks send after they have written their items, each into one file, as the coordinator decodes it."""
    boxes = starts(index.tensor_ndim.repeat(index.tensor_chunks))[:-1]
    stored_bytes = (np.multiply.reduceat(index.chunk_sizes, boxes) * 2).astype(np.uint32)
    del boxes
    results = []
    for rank, planned in enumerate(exchange._final):
        assert planned is not None
        sizes = np.append(stored_bytes[planned.chunks], [64] * len(planned.objects))
        count = len(sizes)
        columns = items(count, sizes, starts(sizes)[:-1], np.zeros(count), framed=False)
        columns.framing[len(planned.chunks) :] = Framing.OBJECT
        stored = StoredItems(columns, [f"__{rank}_0.{INFO.save_id}.distcp"])
        results.append(decode(encode(pack(stored, len(planned.chunks), b""))))
    return results


def manifest_of(metadata: Metadata, exchange: PlanExchange) -> dict[str, float]:
    """Size of the index that is published, and the time to write and to read it."""
    records = records_of(metadata)
    assert records is not None
    packed = results_of(exchange, records.index)
    start = time.process_time()
    index = written_index(metadata, [exchange.unpack_results(one, rank) for rank, one in enumerate(packed)])
    index.info = INFO
    data = encode_index(index, interop=False)
    written = time.process_time()
    read_index(data, file="simulated")
    return {
        "manifest_bytes": len(data),
        "write_seconds": written - start,
        "read_seconds": time.process_time() - written,
    }


def peak_mib() -> float:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(world: int) -> dict[str, Any]:
    """A first save and an unchanged one on `world` ranks."""
    idle = peak_mib()
    first, answers, metadata, exchange = coordinate(world)
    found: dict[str, Any] = {"ranks": world, "chunks": world * TENSORS, "first": first}
    found |= {"idle_mib": idle, "planned_mib": peak_mib(), **manifest_of(metadata, exchange)}
    found["peak_mib"] = peak_mib()
    again, seconds = [], []
    for rank in range(1, world, max(1, world // 64)):
        start = time.process_time()
        again.append(ask(rank, world, answers[rank]))
        seconds.append(time.process_time() - start)
        RANK_PLANS.clear()
    found["again_up_bytes"] = max(map(len, again))
    found["rank_seconds"] = statistics.median(seconds)
    return found


def stock_seconds(world: int) -> dict[str, Any]:
    """The global plan of `torch.distributed.checkpoint` for the same shards."""
    names, shapes, kind = layout(world)
    types, make = stock.planner.WriteItemType, stock.planner.WriteItem
    properties = stock.metadata.TensorProperties(torch.bfloat16)
    all_plans = []
    for rank in range(world):
        plan = []
        for name, shape, cut in zip(names, shapes.tolist(), kind.tolist(), strict=True):
            size = torch.Size(shape if cut else shape[:1])
            begin = {0: (0,), 1: (rank * ROWS, 0), 2: (rank // 8 * ROWS, rank % 8 * COLUMNS)}[cut]
            chunk = stock.metadata.ChunkStorageMetadata(torch.Size(begin), torch.Size((ROWS, COLUMNS)) if cut else size)
            data = stock.planner.TensorWriteData(chunk, properties, size)
            key = stock.metadata.MetadataIndex(name, torch.Size(begin))
            plan.append(make(key, types.SHARD if cut else types.TENSOR, tensor_data=data))
        all_plans.append(stock.planner.SavePlan(plan, planner_data={}))
    planner = stock.default_planner.DefaultSavePlanner()
    start = time.process_time()
    planner.create_global_plan(all_plans)
    seconds = time.process_time() - start
    return {"ranks": world, "stock_plan_seconds": seconds, "stock_plan_bytes": len(encode(all_plans[-1]))}


def in_own_process(*arguments: str) -> dict[str, Any]:
    """The JSON that this module prints in another process."""
    command = [sys.executable, "-m", "integration_tests.benchmarks.planning", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="world sizes (default: %(default)s)")
    parser.add_argument("--stock", type=int, nargs="*", default=(16, 64), help="world sizes for stock's planner")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one-of-stock", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one or options.one_of_stock:
        print(json.dumps(simulate(options.one) if options.one else stock_seconds(options.one_of_stock)))
        return
    print(f"{TENSORS:,} tensors; processor seconds of the coordinator, bytes of one rank")
    print(
        "  ranks   decode     plan   encode |  sends    gets  unchanged    rank |  index  write    read | MiB planned"
    )
    rows = []
    for world in options.ranks:
        row = in_own_process("--one", str(world))
        rows.append(row)
        decoding, planning, encoding, _, up, down, _ = row["first"].values()
        print(
            f"{world:7,} {decoding:8.2f} {planning:8.2f} {encoding:8.2f} | {up / 1e3:5.1f}k {down / 1e3:6.1f}k |"
            f" {row['again_up_bytes']:7,} B {row['rank_seconds'] * 1e3:4.0f}ms | {row['manifest_bytes'] / 1e6:5.1f}M"
            f" {row['write_seconds']:5.2f}s {row['read_seconds']:6.2f}s |"
            f" {row['idle_mib']:5,.0f} {row['planned_mib']:6,.0f} {row['peak_mib']:6,.0f}",
            flush=True,
        )
    for world in options.stock:
        row = in_own_process("--one-of-stock", str(world))
        rows.append(row)
        print(
            f"{world:7,} stock: plan {row['stock_plan_seconds']:.1f} s, {row['stock_plan_bytes'] / 1e3:,.0f}k per rank",
            flush=True,
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
