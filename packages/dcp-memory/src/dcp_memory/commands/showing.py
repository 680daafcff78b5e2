"""Output of the status of keepers: a few lines for each, or JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence

import click

from dcp_manifest import printable, printable_bytes
from dcp_memory.control import KeeperStatus

__all__ = ["print_all"]


def print_all(found: Sequence[KeeperStatus], *, as_json: bool) -> None:
    """Print the status of keepers."""
    if as_json:
        click.echo(json.dumps([_record(each) for each in found], indent=2, allow_nan=False))
        return
    for each in found:
        for line in _lines(each):
            click.echo(printable(line))


def _record(status: KeeperStatus) -> dict[str, object]:
    """Return a status for JSON, which has no infinity: a keeper that is never idle has `null` there."""
    record = dataclasses.asdict(status)
    return record if math.isfinite(status.idle_seconds) else {**record, "idle_seconds": None}


def _lines(status: KeeperStatus) -> list[str]:
    minutes = max(0, round((time.time() - status.began) / 60))
    free = printable_bytes(status.free_arena_bytes)
    arenas = f"{status.arenas} arenas of {printable_bytes(status.arena_bytes)}, {free} free"
    copies = f"{printable_bytes(status.used_slab_bytes)} of {printable_bytes(status.slab_bytes)} for copies"
    return [
        f"keeper://{status.run}  process {status.pid}, for {minutes} min, {status.clients} connections",
        f"  memory   {printable_bytes(status.bytes)} of {printable_bytes(status.max_bytes)}",
        f"  objects  {status.objects}, {printable_bytes(status.object_bytes)}",
        f"  lent     {printable_bytes(status.lent_bytes)} now; {arenas}",
        f"  copied   {copies}",
    ]
