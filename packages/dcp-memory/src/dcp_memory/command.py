"""`dcp keeper`: start, stop and show the keepers of this user on this host."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import click

from dcp_base.escaping import printable, printable_bytes
from dcp_memory.control import STOP_TIMEOUT_SECONDS, KeeperStatus, keeper_runs, keeper_status, start_keeper, stop_keeper
from dcp_memory.errors import KeeperLostError
from dcp_memory.places import check_run

_EXAMPLES = (
    "\b\nExamples:\n  dcp keeper start my-run --max-bytes 64G\n  dcp keeper status\n  dcp ls keeper://my-run\n"
    "  dcp keeper stop my-run"
)

_Runs = TypeVar("_Runs", str, tuple[str, ...])


class _Seconds(click.FloatRange):
    name = "seconds"

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Refuse NaN, which is in no range."""
        seconds = float(super().convert(value, param, ctx))
        if seconds != seconds:  # noqa: PLR0124 - NaN
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


def _checked_runs(context: click.Context, parameter: click.Parameter, runs: _Runs) -> _Runs:
    for run in (runs,) if isinstance(runs, str) else runs:
        try:
            check_run(run)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return runs


@click.group("keeper", epilog=_EXAMPLES)
def command() -> None:
    """Start, stop and show keepers: processes that hold the checkpoints of a run in the memory of this host.

    A keeper serves its own user alone. Saving to keeper://RUN starts one.
    """


@command.command("start")
@click.argument("run", callback=_checked_runs)
@click.option("--max-bytes", help="Limit of its memory, such as 64G; default: half of what is available.")
@click.option("--generations", type=click.IntRange(1), help="Checkpoints that the run keeps in it; default: 2.")
@click.option(
    "--idle-timeout-seconds", type=_Seconds(), help="End after so long without a process that saves; default: 1800."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def _start(
    run: str, max_bytes: str | None, generations: int | None, idle_timeout_seconds: float | None, as_json: bool
) -> int:
    """Start the keeper of RUN, unless it runs, and show it."""
    found = start_keeper(run, max_bytes=max_bytes, generations=generations, idle_timeout_seconds=idle_timeout_seconds)
    _print_all([found], as_json=as_json)
    return 0


@command.command("status")
@click.argument("runs", nargs=-1, metavar="[RUN]...", callback=_checked_runs)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def _status(runs: tuple[str, ...], as_json: bool) -> int:
    """Show what all keepers hold, or the given ones.

    The exit code is 3 if a given run has none, or a keeper does not answer.
    """
    found, problems = [], []
    for run in runs or keeper_runs():
        try:
            one = keeper_status(run)
        except KeeperLostError as error:  # the others are shown all the same
            problems.append(str(error))
            continue
        if one is not None:
            found.append(one)
        elif runs:
            problems.append(f"{run}: no keeper runs on this host, for this user")
    _print_all(found, as_json=as_json)
    for problem in problems:
        click.echo(printable(problem), err=True)
    return 3 if problems else 0


@command.command("stop")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", callback=_checked_runs)
@click.option("--kill", is_flag=True, help="Kill a keeper that does not end in time.")
@click.option("--timeout-seconds", type=_Seconds(), default=STOP_TIMEOUT_SECONDS, help="Time that each has to end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def _stop(runs: tuple[str, ...], kill: bool, timeout_seconds: float, as_json: bool) -> int:
    """Stop the keepers of runs, and wait until they have ended. The checkpoints in their memory are lost.

    The exit code is 0 also for a run that has none.
    """
    stopped = {run: stop_keeper(run, timeout_seconds=timeout_seconds, kill=kill) for run in runs}
    if as_json:
        click.echo(json.dumps([{"run": run, "stopped": each} for run, each in stopped.items()], indent=2))
        return 0
    for run, each in stopped.items():
        click.echo(printable(f"{run}: stopped" if each else f"{run}: no keeper runs here"))
    return 0


def _print_all(found: Sequence[KeeperStatus], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_record(each) for each in found], indent=2, allow_nan=False))
        return
    for each in found:
        for line in _lines(each):
            click.echo(printable(line))


def _record(status: KeeperStatus) -> dict[str, object]:
    record = dataclasses.asdict(status)
    return record if math.isfinite(status.idle_timeout_seconds) else {**record, "idle_timeout_seconds": None}


def _lines(status: KeeperStatus) -> list[str]:
    minutes = max(0, round((time.time() - status.began) / 60))
    free = printable_bytes(status.free_arena_bytes)
    arenas = f"{status.arenas} arenas of {printable_bytes(status.arena_bytes)}, {free} free"
    copies = f"{printable_bytes(status.used_slab_bytes)} of {printable_bytes(status.slab_bytes)} for copies"
    clients = f"{status.clients} connection{'s' * (status.clients != 1)}"
    return [
        f"keeper://{status.run}  process {status.pid}, for {minutes} min, {clients}",
        f"  memory   {printable_bytes(status.bytes)} of {printable_bytes(status.max_bytes)}",
        f"  objects  {status.objects}, {printable_bytes(status.object_bytes)}",
        f"  lent     {printable_bytes(status.lent_bytes)} now; {arenas}",
        f"  copied   {copies}",
    ]
