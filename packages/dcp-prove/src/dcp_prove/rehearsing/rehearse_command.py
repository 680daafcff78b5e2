"""`dcp rehearse`: what a save of a large job takes, before the job exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from dcp_base.escaping import printable, printable_bytes
from dcp_core.testing.rehearsal.world import Cluster
from dcp_inspect.visuals.picture import draw_timeline
from dcp_prove.rehearsing.rehearsal import PHASES, Report, Spans, rehearse
from dcp_prove.rehearsing.states import MODELS, read_tensors

_MOST_RANKS = 16_384
_RANKS_PER_HOST = 8
_WRITER_THREADS = 8
"""As `FileSystemWriter` takes on hosts with at least so many cores."""
_PERCENTILES = 0, 1, 10, 25, 50, 75, 90, 99, 100
_GIGA = 1e9
_RATE = click.FloatRange(0, min_open=True)
_EXAMPLES = (
    "\b\nExamples:\n  dcp rehearse --ranks 4096 --state llama-3-405b\n"
    "  dcp rehearse --ranks 64 --hosts 16 --state runs/step-100 --storage 5\n"
    "  dcp rehearse --ranks 256 --state train:make_state --deaths 8 --svg save.svg"
)


@click.command("rehearse", epilog=_EXAMPLES)
@click.option("--ranks", type=click.IntRange(2, _MOST_RANKS), required=True, help="Number of ranks.")
@click.option("--hosts", type=click.IntRange(1), help="Number of hosts (one for 8 ranks).")
@click.option("--state", required=True, help=f"{', '.join(MODELS)}, FILE.toml, a checkpoint, or module:function.")
@click.option("--seed", type=int, default=0, help="Equal seeds give equal results (0).")
@click.option("--host-storage", type=_RATE, default=2.0, help="GB per second that one host writes (2).")
@click.option("--storage", type=_RATE, default=100.0, help="GB per second that all hosts write together (100).")
@click.option("--network", type=_RATE, default=12.5, help="GB per second of a host's network card (12.5).")
@click.option("--store-seconds", type=click.FloatRange(0), default=1e-4, help="Time to the store, one way (0.0001).")
@click.option("--stragglers", type=click.IntRange(0), default=0, help="Number of ranks that arrive late (0).")
@click.option("--late-seconds", type=click.FloatRange(0), default=20.0, help="How late they are (20).")
@click.option("--deaths", type=click.IntRange(0), default=1, help="Ranks that die in a second save; 0 for none (1).")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write a picture of the phases over time.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    ranks: int,
    hosts: int | None,
    state: str,
    seed: int,
    host_storage: float,
    storage: float,
    network: float,
    store_seconds: float,
    stragglers: int,
    late_seconds: float,
    deaths: int,
    svg: str | None,
    as_json: bool,
) -> int:
    """Rehearse a save of a large job in virtual time, on this machine alone.

    The real code plans, exchanges messages, commits and writes the index. The network, the store and the storage are
    simulated with the rates of the options, without the bytes of tensors. Each tensor is cut by rows over all ranks, as
    FSDP does. The report has seconds by phase, bytes, files, memory, connections, the busiest device, and the cost of
    ranks that die.

    STATE is a model with float32 parameters and both moments of AdamW; a file with tensors (docs/planning.md); a
    checkpoint of any number of ranks; or a function that returns a state dict, of meta tensors for example.
    """
    hosts = hosts or max(1, ranks // _RANKS_PER_HOST)
    if ranks % hosts:
        raise click.BadParameter(f"{ranks} ranks cannot be divided evenly among {hosts} hosts", param_hint="--hosts")
    if stragglers > ranks or deaths >= ranks:
        raise click.BadParameter(f"there are only {ranks} ranks, and one must survive")
    cluster = Cluster(
        ranks,
        ranks // hosts,
        store_seconds=store_seconds,
        nic_bytes_per_second=network * _GIGA,
        host_bytes_per_second=host_storage * _GIGA,
        disk_bytes_per_second=storage * _GIGA,
        writer_threads=_WRITER_THREADS,
    )
    report, spans = rehearse(
        read_tensors(state), cluster, seed=seed, stragglers=stragglers, late_seconds=late_seconds, deaths=deaths
    )
    if svg is not None:
        Path(svg).write_text(_picture(state, report, spans), encoding="utf-8")
    if as_json:
        click.echo(json.dumps({"state": state, **asdict(report)}, indent=2))
    else:
        click.echo(printable("\n".join(_lines(state, report)), keep="\n"))
    return 0


def _lines(state: str, report: Report) -> Iterator[str]:
    here, cpu = report.measured, report.measured["coordinator_cpu_seconds"]
    needed, peak = printable_bytes(here["coordinator_bytes"]), printable_bytes(here["bytes"])
    yield f"{state}: {report.tensors:,} tensors, {printable_bytes(report.bytes)}, cut by rows over all ranks"
    yield f"{report.ranks:,} ranks on {report.hosts:,} hosts, in virtual time, seed {report.seed}"
    yield ""
    yield f"{'phase':8}{'median':>10}{'99 %':>10}   CPU of the coordinator (measured, not included)"
    for name, (median, high) in report.phases.items():
        yield f"{name:8}{median:8.3f} s{high:8.3f} s" + (f"{cpu[name]:10.2f} s" if name in cpu else "")
    yield ""
    yield f"per host     {printable_bytes(report.bytes_per_host)} in {report.files_per_host:,} files"
    yield f"index        {printable_bytes(report.index_bytes)}"
    yield f"memory       {needed} for the coordinator's plan and index (measured)"
    yield f"connections  {report.links:,} at most of a rank; {report.store_connections:,} of the store (formula)"
    yield f"messages     {report.store_requests:,} requests to the store; {printable_bytes(report.sent_bytes)} sent"
    yield f"busiest      {', '.join([f'{device} {part:.0%}' for device, part in report.busy.items()][:3])}"
    if report.deaths is not None:
        died, (median, last) = report.deaths, report.deaths.noticed_seconds
        yield f"dead ranks   {', '.join(map(str, died.ranks))} at {died.at_seconds:.3f} s"
        yield f"             {died.error} {median:.3f} s later (median rank) to {last:.3f} s (last)"
        yield "             the save is lost, the checkpoint before it stays"
    yield f"rehearsed    in {here['seconds']:.0f} s with {peak} here; {report.whole_ranks:,} ranks ran all code, others"
    yield "             took plans and file layouts from equal ranks"


def _picture(state: str, report: Report, spans: dict[int, Spans]) -> str:
    """Draw the ranks at some percentiles, in the order in which they have written their files."""
    ordered = sorted(spans, key=lambda rank: (spans[rank]["write"][1], rank))
    chosen = {part: ordered[(len(ordered) - 1) * part // 100] for part in _PERCENTILES}
    rows = [(f"{part} % have written: rank {rank:,}", spans[rank]) for part, rank in chosen.items()]
    return draw_timeline(f"{state}: save of {report.ranks:,} ranks on {report.hosts:,} hosts", PHASES, rows)
