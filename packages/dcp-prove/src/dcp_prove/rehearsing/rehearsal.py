"""`rehearse`: one save of a job, and one in which ranks die; and the report."""

from __future__ import annotations

import random
import resource
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_core.testing.rehearsal.job import WRITING, Job, Tensor
from dcp_core.testing.rehearsal.world import Cluster, World

PHASES = "agree", "plan", "write", "publish"
"""The last two are each rank's own files, and the wait for the index."""
_OF_OPERATION = {"save": "agree", "plan": "plan", "write": "publish"}
# Phase → start and end.
Spans = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Deaths:
    """A second save, in which ranks die when half of the time of writing has passed."""

    ranks: list[int]
    at_seconds: float
    error: str
    noticed_seconds: tuple[float, float]
    """Until the median rank has raised, and the last one, which removes the files of the save."""
    lost_seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a save of the job takes. All but `measured` repeats with the seed."""

    ranks: int
    hosts: int
    seed: int
    tensors: int
    bytes: int
    whole_ranks: int
    phases: dict[str, tuple[float, float]]
    """Median and 99th percentile of the ranks' seconds."""
    bytes_per_host: int
    files_per_host: int
    index_bytes: int
    links: int
    """Connections between ranks, of the rank that has most."""
    store_connections: int
    """By the formula `3 * ranks`."""
    store_requests: int
    sent_bytes: int
    busy: dict[str, float]
    """Device → the part of the save in which the busiest of its kind worked, the largest first."""
    deaths: Deaths | None
    measured: dict[str, Any]


def rehearse(
    tensors: Sequence[Tensor],
    cluster: Cluster,
    *,
    seed: int = 0,
    stragglers: int = 0,
    late_seconds: float = 0.0,
    deaths: int = 0,
) -> tuple[Report, dict[int, Spans]]:
    """Save once, and once more with deaths; return the report, and each rank's phases of the first save.

    `seed` draws stragglers, dead ranks and the order of simultaneous events.
    """
    began, draw = time.perf_counter(), random.Random(seed)
    starts = [0.0] * cluster.ranks
    for rank in draw.sample(range(cluster.ranks), stragglers):
        starts[rank] = late_seconds
    world = World(cluster, seed)
    job = Job(world, tensors)
    for task in job.run(starts):
        if task.error is not None:
            raise task.error
    spans = _spans(world, starts)
    dying = draw.sample(range(cluster.ranks), deaths)
    died = _with_deaths(tensors, cluster, seed, starts, dying, spans) if dying else None
    return _report(job, seed, spans, died, began), spans


def _report(job: Job, seed: int, spans: dict[int, Spans], died: Deaths | None, began: float) -> Report:
    world, cluster, disk, network = job.world, job.world.cluster, job.world.disk, job.world.network
    (index_bytes,) = (file.size for path, file in disk.files.items() if path.endswith("/.metadata"))
    decisions = {_OF_OPERATION[phase]: found for phase, found in world.decisions.items()}
    busy = {
        "the store": network.server.busy_seconds,
        "the store's network card": network.server_nic.busy_seconds,
        "a host's network card": max(card.busy_seconds for card in network.nics.values()),
        "a host's path to storage": max(path.busy_seconds for path in disk.hosts.values()),
        "shared storage": disk.whole.busy_seconds,
    }
    total = max(one["publish"][1] for one in spans.values())
    return Report(
        ranks=cluster.ranks,
        hosts=cluster.ranks // cluster.ranks_per_host,
        seed=seed,
        tensors=len(job.tensors),
        bytes=job.nbytes,
        whole_ranks=job.whole_ranks,
        phases={name: _percentiles([_length(one, name) for one in spans.values()]) for name in (*PHASES, "total")},
        bytes_per_host=max(disk.written_bytes.values()),
        files_per_host=max(disk.file_counts.values()),
        index_bytes=index_bytes,
        links=network.most_links(),
        store_connections=3 * cluster.ranks,
        store_requests=sum(one.requests + one.polls for one in network.traffic),
        sent_bytes=sum(one.set_bytes + one.frame_bytes for one in network.traffic),
        busy={name: part / total for name, part in sorted(busy.items(), key=lambda each: -each[1])},
        deaths=died,
        measured={
            "coordinator_cpu_seconds": {name: seconds for name, (seconds, _) in decisions.items()},
            "coordinator_bytes": max(needed for _, needed in decisions.values()),
            "seconds": time.perf_counter() - began,
            "bytes": max(world.peak_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        },
    )


def _spans(world: World, starts: Sequence[float]) -> dict[int, Spans]:
    """Return rank → phase → start and end; several exchanges of one phase are one."""
    found: dict[int, Spans] = defaultdict(dict)
    for rank, name, start, end in world.phases:
        phase = "write" if name == WRITING else _OF_OPERATION[name]
        found[rank][phase] = found[rank].get(phase, (start,))[0], end
    for rank, one in found.items():
        one["agree"] = starts[rank], one["agree"][1]
        one["publish"] = one["write"][1], one["publish"][1]
    return dict(sorted(found.items()))


def _length(spans: Spans, phase: str) -> float:
    start, end = (spans["agree"][0], spans["publish"][1]) if phase == "total" else spans[phase]
    return end - start


def _percentiles(numbers: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(numbers)
    return ordered[(len(ordered) - 1) // 2], ordered[-1 - len(ordered) // 100]


def _with_deaths(
    tensors: Sequence[Tensor],
    cluster: Cluster,
    seed: int,
    starts: Sequence[float],
    ranks: Sequence[int],
    spans: dict[int, Spans],
) -> Deaths:
    middle = sum(_percentiles([one["write"][side] for one in spans.values()])[0] for side in (0, 1)) / 2
    world = World(cluster, seed)
    world.clock.at(middle, lambda: world.network.kill(ranks))
    job = Job(world, tensors)
    errors = {type(task.error).__name__ for task in job.run(starts) if task.number not in ranks}
    ends = sorted(end for rank, end in job.ends.items() if rank not in ranks)
    noticed = ends[len(ends) // 2] - middle, ends[-1] - middle
    return Deaths(sorted(ranks), middle, " or ".join(sorted(errors)), noticed, ends[-1])
