"""What planning a save costs on many ranks: `python -m integration_tests.benchmarks.planning --help`.

One process plays all ranks in turn: each makes its plan and sends it as bytes, the coordinator decodes them, plans and
encodes its answers. The ranks then send their results, from which the coordinator publishes the index, and each rank
saves once more. What is not simulated is the network between them (see `coordination`), and the tensors' bytes. Each
size runs in a process of its own, so that peak memory is that of the size.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as stock

from dcp_core import ByteStorageWriter
from dcp_core.planning.plan_exchange import RANK_PLANS, PlanExchange, pack
from dcp_core.planning.save_planner import DefaultSavePlanner
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata, StorageMeta
from dcp_core.records.protocols import SavePlan
from dcp_core.saving import _Save
from dcp_core.tables.metadata_columns import records_of
from dcp_core.tables.plan_columns import PlanColumns, WrittenColumns
from dcp_io import LocalStore, RequestSource, Source, StoreBackend
from dcp_manifest import CheckpointIndex
from dcp_manifest.index.columns import Framing, starts
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks.phases.phases import Answer, Outcome, PhasedCoordinator, Verdict
from dcp_ranks.transport.store_wire import decode, encode
from integration_tests.benchmarks.manifest import INFO, items
from integration_tests.benchmarks.pages import replace_figures

RANKS = (64, 256, 1024, 2816, 4096, 16384)
STOCK_RANKS = (16, 64, 256)
MODULE = "integration_tests.benchmarks.planning"
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


class Played(PhasedCoordinator):
    """The coordinator as a rank of the simulation sees it."""

    def __init__(self, rank: int, world: int, exchange: Callable[[Any, Callable[[list[Any]], Sequence[Any]]], Any]):
        super().__init__(rank, world, 0)
        self._play = exchange

    def reduce_scatter(self, phase: str, map_fn: Any, reduce_fn: Any) -> Any:
        """Hand both sides of the phase to the simulation."""
        del phase
        return self._play(map_fn(), reduce_fn)

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    all_reduce = all_gather = broadcast = barrier = save_nonce = _exchange = _withdraw = _unused  # type: ignore[assignment]

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


class Writer(ByteStorageWriter):
    """Writes the index into a folder."""

    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Every folder."""
        del checkpoint_id
        return True


def results_of(exchange: PlanExchange, index: CheckpointIndex) -> tuple[list[Outcome], Any]:
    """What the ranks send after they have written their items, each into one file; and the coordinator's own."""
    boxes = starts(index.tensor_ndim.repeat(index.tensor_chunks))[:-1]
    stored_bytes = (np.multiply.reduceat(index.chunk_sizes, boxes) * 2).astype(np.uint32)
    del boxes
    results, own = [Outcome("write")], None
    for rank, planned in enumerate(exchange._final):
        assert planned is not None
        sizes = np.append(stored_bytes[planned.chunks], [64] * len(planned.objects))
        count = len(sizes)
        columns = items(count, sizes, starts(sizes)[:-1], np.zeros(count), framed=False)
        columns.framing[len(planned.chunks) :] = Framing.OBJECT
        stored = StoredItems(columns, [f"__{rank}_0.{INFO.save_id}.distcp"])
        if rank:
            results.append(Outcome("write", encode(pack(stored, len(planned.chunks), b""))))
        else:
            own = LazyList(WrittenColumns(planned, stored))
    return results, own


def manifest_of(metadata: Metadata, exchange: PlanExchange) -> dict[str, float]:
    """The coordinator's last phase, until the index is published."""
    records = records_of(metadata)
    assert records is not None
    sent, own = results_of(exchange, records.index)
    result_bytes = max(len(one.value or b"") for one in sent)
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(folder, interop=False)
        writer.set_up_storage_writer(True, rank=0, world_size=len(sent))
        writer.prepare_global_plan([SavePlan([])] * len(sent))
        run = _Save({}, folder, writer, DefaultSavePlanner(), exchange.coordinator, True)
        run.writer, run.exchange, run.metadata = writer, exchange, metadata
        start = time.process_time()
        conclude = exchange.coordinator._conclude  # type: ignore[attr-defined]
        answer = conclude(0, "write", sent, own, lambda results: Answer(Verdict(), own=run.publish(results)))
        written = time.process_time()
        if answer.error is not None:
            raise answer.error
        return {
            "manifest_bytes": Path(folder, ".metadata").stat().st_size,
            "result_bytes": result_bytes,
            "write_seconds": written - start,
            "peak_mib": peak_mib(),
            **part_of(folder, len(sent)),
        }


def part_of(folder: str, world: int) -> dict[str, float]:
    """What a rank reads of the index, if half as many ranks load the checkpoint."""
    names, shapes, kinds = layout(world)
    boxes = {}
    for name, shape, kind in zip(names, shapes.tolist(), kinds.tolist(), strict=True):
        sizes = [extent for extent in shape if extent]
        if kind:
            sizes[0] //= world // 2
        boxes[name] = [((5 * sizes[0] if kind else 0, *[0] * (len(sizes) - 1)), tuple(sizes))]
    store = CountingStore(folder)
    start = time.process_time()
    StoreBackend(store).read_index(lambda: boxes)
    return {"part_bytes": store.count, "part_seconds": time.process_time() - start}


class CountingStore(LocalStore):
    """Counts the bytes that are read."""

    count = 0

    def open(self, name: str) -> Source:
        source = super().open(name)

        def read(offset: int, buffer: memoryview) -> None:
            self.count += len(buffer)
            source.read_into(offset, [buffer])

        return RequestSource(source.size, read)


def peak_mib() -> float:
    """The largest memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def simulate(world: int) -> dict[str, Any]:
    """A first save and an unchanged one on `world` ranks."""
    idle = peak_mib()
    first, answers, metadata, exchange = coordinate(world)
    found: dict[str, Any] = {"ranks": world, "chunks": world * TENSORS, "first": first}
    found |= {"idle_mib": idle, "planned_mib": peak_mib(), **manifest_of(metadata, exchange)}
    again, seconds = [], []
    for rank in range(1, world, max(1, world // 64)):
        start = time.process_time()
        again.append(ask(rank, world, answers[rank]))
        seconds.append(time.process_time() - start)
        RANK_PLANS.clear()
    found["again_up_bytes"] = max(map(len, again))
    found["rank_seconds"] = statistics.median(seconds)
    tracemalloc.start()
    ask(1, world, answers[1])
    found["rank_mib"] = tracemalloc.get_traced_memory()[1] / (1 << 20)
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
    command = [sys.executable, "-m", MODULE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of Markdown."""
    lines = [f"| {' | '.join(titles)} |", f"|{' ---: |' * len(titles)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def seconds(value: float) -> str:
    """Two digits."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def size(nbytes: float) -> str:
    """Two digits or more, in kB or MB."""
    return f"{nbytes / 1e3:.1f} kB" if nbytes < 1e6 else f"{nbytes / 1e6:,.1f} MB"


def page_lines(rows: Sequence[Mapping[str, Any]], stock_rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables of the page."""
    plans, indexes = [], []
    for row in rows:
        first, ranks = row["first"], f"{row['ranks']:,}"
        phases = (first["decode_seconds"], first["plan_seconds"], first["encode_seconds"])
        up, down = size(first["up_bytes"]), size(first["down_bytes"])
        rank = f"{row['rank_seconds'] * 1e3:.0f} ms", f"{row['rank_mib']:.1f} MiB"
        again = f"{row['again_up_bytes']} B"
        plans.append([ranks, f"{row['chunks']:,}", *map(seconds, phases), up, down, again, *rank])
        memory = f"{row['planned_mib']:,.0f} MiB", f"{row['peak_mib']:,.0f} MiB"
        whole = seconds(sum(phases) + row["write_seconds"])
        results = size(row["result_bytes"])
        part = size(row["part_bytes"]), seconds(row["part_seconds"])
        index = size(row["manifest_bytes"]), seconds(row["write_seconds"])
        indexes.append([ranks, results, *index, whole, *memory, *part])
    of_plans = ["ranks", "chunks", "decode", "plan", "encode", "a rank sends", "a rank gets", "sends, unchanged"]
    of_indexes = ["ranks", "a rank's results", "index", "published in", "all phases"]
    of_stock = ["ranks, PyTorch", "plan", "a rank sends each time"]
    return [
        *table([*of_plans, "a rank's work", "its memory"], plans),
        "",
        *table([*of_indexes, "memory, planned", "memory, published", "a load reads of it", "in"], indexes),
        "",
        *table(
            of_stock,
            [
                [f"{row['ranks']:,}", seconds(row["stock_plan_seconds"]), size(row["stock_plan_bytes"])]
                for row in stock_rows
            ],
        ),
    ]


def main() -> None:
    """Print a row for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="world sizes (default: %(default)s)")
    parser.add_argument("--stock", type=int, nargs="*", default=STOCK_RANKS, help="world sizes for stock's planner")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of each size; seconds are medians (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: make the page of these figures")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one-of-stock", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one or options.one_of_stock:
        print(json.dumps(simulate(options.one) if options.one else stock_seconds(options.one_of_stock)))
        return
    if options.from_json:
        figures = json.loads(options.from_json.read_text())
    else:
        figures = {"rows": [], "stock": []}
        for kind, option, worlds in (("rows", "--one", options.ranks), ("stock", "--one-of-stock", options.stock)):
            for world in worlds:
                rounds = [in_own_process(option, str(world)) for _ in range(options.rounds)]
                figures[kind].append(median_of(rounds))
                print(json.dumps(figures[kind][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    lines = page_lines(figures["rows"], figures["stock"])
    print("\n".join(lines))
    if options.page:
        replace_figures(options.page, MODULE, lines)


def median_of(rounds: Sequence[Any]) -> Any:
    """Of each number."""
    if isinstance(rounds[0], Mapping):
        return {name: median_of([each[name] for each in rounds]) for name in rounds[0]}
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
